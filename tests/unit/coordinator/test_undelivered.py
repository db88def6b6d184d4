"""Assignments that an earlier coordinator logged and may not have sent: the next one sends them at the first heartbeat."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
from rlharvest.fleet import member as life
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import attempt_of
from rlharvest.testing.clock import FakeClock
from rlharvest.v1 import fleet_pb2, ledger_pb2
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.dispatcher import Dispatcher
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.history import History
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.scope import Scope

JOB, WORKER = "rljob_x", "wkr_x"


class Outbox(Courier):
    """Remembers what would be sent."""

    def __init__(self, scope: Scope) -> None:
        super().__init__(scope, History(scope))
        self.outbox: list[int] = []

    def send(self, handles: Any) -> None:
        self.outbox += handles


def dispatcher_of(*, assigned_in: int, leading: int) -> tuple[Dispatcher, Outbox, Seat]:
    """Return the dispatcher of a coordinator of epoch `leading` whose book has one response, given out in `assigned_in`."""
    book = Book(JOB)
    admit = ledger_pb2.Admit(group=0, first_handle=0, n=1, budget=10)
    assign = ledger_pb2.Assign(handle=0, attempt=attempt_of(assigned_in, 1), worker=WORKER, incarnation=1)
    changes = [ledger_pb2.Change(admit=admit), ledger_pb2.Change(assign=assign)]
    book.transition(ledger_pb2.Transition(epoch=assigned_in, number=1, changes=changes))
    clock = FakeClock()
    scope = cast(Scope, SimpleNamespace(id=JOB, book=book, clock=clock, keeper=SimpleNamespace(epoch=leading)))
    outbox = Outbox(scope)
    seat = Seat(
        member=life.join(WORKER, 1, now=0.0),
        hostname="h",
        pid=1,
        worker_class="preemptible",
        worker_type="cpu",
        engines=("stub",),
        slots=1,
        numerics_key="",
        batch_invariant=True,
        joined_at=0.0,
        heartbeat=fleet_pb2.Heartbeat(job=JOB),
    )
    return Dispatcher(scope, outbox, cast(Harvest, None)), outbox, seat


def test_assignment_of_a_dead_coordinator_is_sent_by_the_next_one() -> None:
    dispatcher, outbox, seat = dispatcher_of(assigned_in=1, leading=2)
    dispatcher.beat(seat)
    assert outbox.outbox == [0]


def test_assignment_that_its_worker_shows_is_not_sent_again() -> None:
    dispatcher, outbox, seat = dispatcher_of(assigned_in=1, leading=2)
    seat.held = {0: attempt_of(1, 1)}
    dispatcher.beat(seat)
    assert outbox.outbox == []


@pytest.mark.parametrize("beats", [1, 2])
def test_assignment_of_this_coordinator_is_sent_by_the_log_alone(beats: int) -> None:
    """A heartbeat between the log and the store must not send what the store does not have."""
    dispatcher, outbox, seat = dispatcher_of(assigned_in=2, leading=2)
    for _ in range(beats):
        dispatcher.beat(seat)
    assert outbox.outbox == []
