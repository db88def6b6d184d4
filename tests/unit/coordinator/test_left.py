"""What a run remembers of a response goes with it, whatever came late."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import apply
from rlharvest.ledger.response import attempt_of
from rlharvest.spans import Finish, Flush, Run, Span, pack
from rlharvest.testing.clock import FakeClock
from rlharvest.v1 import ledger_pb2
from rlharvest_coordinator import run as runs
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.history import History
from rlharvest_coordinator.log import Entry
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.serving import Serving

JOB, WORKER, N = "rljob_x", "wkr_x", 2


class Bus:
    """Takes every message."""

    async def publish(self, subject: str, data: bytes) -> None:
        pass


def running() -> runs.Run:
    """Return a run of an empty book, with nobody to reach."""
    scope: Any = SimpleNamespace(
        id=JOB,
        book=Book(JOB),
        clock=FakeClock(),
        nats=Bus(),
        woken=SimpleNamespace(set=lambda: None),
        keeper=SimpleNamespace(epoch=1),
        roster=SimpleNamespace(seats={}),
        seat=lambda response: None,
        spec=SimpleNamespace(sampling=SimpleNamespace(num_generations=N)),
    )
    found = runs.Run.__new__(runs.Run)
    found.scope = cast(Scope, scope)
    found.history = History(found.scope)
    found.courier = Courier(found.scope, found.history)
    found.harvest = Harvest(found.scope, found.courier)
    found.serving = Serving(found.scope, found.courier)
    return found


async def hear(run: runs.Run, *records: tuple[str, bytes]) -> None:
    """Let a run hear records of the log that came together."""
    entries = [
        (Entry(at, kind, JOB, WORKER, data), apply(run.scope.book, kind, data))
        for at, (kind, data) in enumerate(records, 1)
    ]
    await run.applied(entries)


def transition(number: int, *changes: ledger_pb2.Change) -> tuple[str, bytes]:
    return "ledger", ledger_pb2.Transition(epoch=1, number=number, changes=changes).SerializeToString()


def flush(number: int, group: int) -> tuple[str, bytes]:
    """A flush that finishes the responses of a group."""
    spans = tuple(
        Span(
            handle=handle,
            attempt=attempt_of(1, 1),
            offset=0,
            ids=np.array([5], np.uint32),
            logprobs=np.array([-1.0], np.float32),
            runs=(Run(1, 0),),
            finish=Finish.EOS,
        )
        for handle in range(group * N, group * N + N)
    )
    return "spans", pack(Flush(worker=WORKER, incarnation=1, number=number, spans=spans))


async def test_nothing_is_remembered_of_groups_that_left() -> None:
    """A flush that comes a second time is acknowledged, and its responses leave all the same."""
    run = running()
    for group in range(20):
        first = group * N
        assigns = [
            ledger_pb2.Change(
                assign=ledger_pb2.Assign(handle=first + i, attempt=attempt_of(1, 1), worker=WORKER, incarnation=1)
            )
            for i in range(N)
        ]
        admit = ledger_pb2.Change(admit=ledger_pb2.Admit(group=group, first_handle=first, n=N, budget=8))
        await hear(run, transition(3 * group + 1, admit, *assigns))
        for handle in (first, first + 1):
            run.courier.sent[handle] = (attempt_of(1, 1), 0.0, 0)
            run.courier.missing[handle] = 1
            run.harvest.questions.asked[handle] = (0.0, 1)
            run.harvest._too_large[handle] = 1
        await hear(run, flush(2 * group + 1, group))
        leaves = (
            ledger_pb2.Change(retire=ledger_pb2.Retire(group=group))
            if group % 2
            else ledger_pb2.Change(drop=ledger_pb2.Drop(group=group))
        )
        assert run.courier.progress
        again = flush(2 * group + 2, group)
        await hear(run, again, transition(3 * group + 2, leaves), again)
    remembered = (run.courier.sent, run.courier.progress, run.courier.missing)
    assert [len(each) for each in remembered] == [0, 0, 0]
    assert (run.harvest.questions.asked, run.harvest._too_large) == ({}, {})
