"""Who may join: a bounded number of workers, each of which says a bounded amount."""

from __future__ import annotations

from typing import Any

import pytest
from nats.aio.client import Client
from rlharvest.errors import InvalidField, LimitReached
from rlharvest.fleet.member import Timing
from rlharvest.testing.clock import FakeClock
from rlharvest.v1 import fleet_pb2
from rlharvest_coordinator import registration
from rlharvest_coordinator.leader import Leadership
from rlharvest_coordinator.roster import Roster
from rlharvest_coordinator.sql import Sessions


@pytest.fixture
async def roster(nats: Client, sessions: Sessions) -> Roster:
    clock = FakeClock()
    leadership = Leadership(sessions, "test", clock, lease_s=1.0)
    await leadership.acquire()
    timing = Timing(heartbeat_s=0.5, deadline_s=3.0)
    return Roster(nats, sessions, clock, timing, lambda: leadership.epoch, most_workers=2)


async def join(roster: Roster, worker: str, **given: Any) -> int:
    """Join; return the incarnation."""
    request = fleet_pb2.RegisterRequest(**{"worker": worker, "slots": 4, "engines": ["stub"], **given})
    return int((await roster.Register(request, Context())).incarnation)


class Context:
    """Of a call that nobody refuses by itself."""

    def invocation_metadata(self) -> tuple[()]:
        return ()


async def test_a_worker_too_many_is_told_so_and_joins_later(roster: Roster) -> None:
    for worker in ("wkr_a", "wkr_b"):
        await join(roster, worker)
    with pytest.raises(LimitReached, match=r"workers: the limit of 2 is reached.*RLHARVEST_MOST_WORKERS"):
        await join(roster, "wkr_c")
    assert await join(roster, "wkr_a") == 2, "one that joins again takes its own place"
    await roster.Leave(fleet_pb2.LeaveRequest(worker="wkr_b", incarnation=1), Context())
    assert await join(roster, "wkr_c") == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("worker", "w" * 101),
        ("worker", "a.b"),
        ("slots", registration.MAX_SLOTS + 1),
        ("pid", 2**31),
        ("engines", ["e"] * (registration.MAX_ENGINES + 1)),
        ("hostname", "h" * (registration.MAX_TEXT + 1)),
        ("numerics_key", "n" * (registration.MAX_TEXT + 1)),
        ("worker_type", "\0"),
    ],
)
async def test_what_a_worker_says_of_itself_is_bounded(roster: Roster, field: str, value: object) -> None:
    with pytest.raises(InvalidField) as caught:
        await join(roster, **{"worker": "wkr_a", field: value})
    assert caught.value.field == field
    assert roster.seats == {}
