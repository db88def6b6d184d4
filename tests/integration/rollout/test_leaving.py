"""A worker that leaves stays away: no heartbeat and no new incarnation after its Leave."""

from __future__ import annotations

import asyncio

import pytest
from rlharvest.testing import coordinator as fake
from rlharvest.v1 import fleet_pb2


async def test_no_heartbeat_and_no_rejoin_follow_a_leave(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the coordinator answers slowly, and orders a rejoin meanwhile, as it does on a late heartbeat."""
    name, process = await world.join()
    c = world.coordinator
    incarnation = c.workers[name].incarnation
    late: list[int] = []

    async def leave(self: object, request: fleet_pb2.LeaveRequest, context: object) -> fleet_pb2.LeaveReply:
        await asyncio.sleep(0.2)  # a heartbeat that was sent before the Leave is here now
        before = c.workers[name].beats
        await c.order("rejoin", name, fleet_pb2.Rejoin(incarnation=incarnation, reason="unknown"))
        await asyncio.sleep(0.5)
        late.append(c.workers[name].beats - before)
        c.left(request)
        return fleet_pb2.LeaveReply()

    monkeypatch.setattr(fake._Fleet, "Leave", leave)
    process.terminate()
    assert await process.exit_code() == 0
    assert late == [0]
    assert c.workers[name].incarnation == incarnation
    assert c.workers[name].left == "shut down"


async def test_a_worker_that_is_just_being_registered_leaves_too(world, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the coordinator would take its silence for a death."""
    c = world.coordinator
    asked = asyncio.Event()

    async def register(self: object, request: fleet_pb2.RegisterRequest, context: object) -> fleet_pb2.RegisterReply:
        asked.set()
        await asyncio.sleep(0.5)
        return c.register(request)

    monkeypatch.setattr(fake._Fleet, "Register", register)
    process = world.start()
    await asyncio.wait_for(asked.wait(), 60)
    process.terminate()
    assert await process.exit_code() == 0
    (seen,) = c.workers.values()
    assert seen.left == "shut down"
