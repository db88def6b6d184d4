"""A worker that leaves stays away: no heartbeat and no new incarnation after its Leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from rlharvest.testing import coordinator as fake
from rlharvest.v1 import fleet_pb2


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[[], Awaitable[None]]]:
    """Return what is awaited before a call of the Fleet service is answered, by its name. Use it before `world`."""
    hooks: dict[str, Callable[[], Awaitable[None]]] = {}
    for name in ("Register", "Leave"):
        answer = getattr(fake._Fleet, name)

        async def hooked(self: Any, request: Any, context: Any, name: str = name, answer: Any = answer) -> Any:
            if name in hooks:
                await hooks[name]()
            return await answer(self, request, context)

        monkeypatch.setattr(fake._Fleet, name, hooked)
    return hooks


async def test_no_heartbeat_and_no_rejoin_follow_a_leave(before, world) -> None:
    """Though the coordinator answers slowly, and orders a rejoin meanwhile, as it does on a late heartbeat."""
    name, process = await world.join()
    c = world.coordinator
    incarnation = c.workers[name].incarnation
    late: list[int] = []

    async def leave() -> None:
        await asyncio.sleep(0.2)  # a heartbeat that was sent before the Leave is here by now
        beats = c.workers[name].beats
        await c.order("rejoin", name, fleet_pb2.Rejoin(incarnation=incarnation, reason="unknown", epoch=c.epoch))
        await asyncio.sleep(0.5)
        late.append(c.workers[name].beats - beats)

    before["Leave"] = leave
    process.terminate()
    assert await process.exit_code() == 0
    assert late == [0]
    assert c.workers[name].incarnation == incarnation
    assert c.workers[name].left == "shut down"


async def test_a_worker_that_is_just_being_registered_leaves_too(before, world) -> None:
    """Else the coordinator would take its silence for a death."""
    c = world.coordinator
    asked = asyncio.Event()

    async def register() -> None:
        asked.set()
        await asyncio.sleep(0.5)

    before["Register"] = register
    process = world.start()
    await asyncio.wait_for(asked.wait(), 60)
    process.terminate()
    assert await process.exit_code() == 0
    (seen,) = c.workers.values()
    assert seen.left == "shut down"
