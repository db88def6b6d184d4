"""Completions between the ledger and their clients: what was given is given once, whatever happens to the book."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.errors import Unavailable
from rlharvest.ledger import snapshot
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import apply
from rlharvest.ledger.response import FIRST_SERVED, attempt_of
from rlharvest.policies import blame
from rlharvest.spans import Finish, Flush, Run, Span, pack
from rlharvest.v1 import fleet_pb2, ledger_pb2
from rlharvest_coordinator.courier import Asked, Courier
from rlharvest_coordinator.history import History
from rlharvest_coordinator.log import Entry
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.serving import Answer, Delta, Serving

JOB, N, BUDGET = "rljob_x", 2, 12
ASKED = Asked(b"", 7, fleet_pb2.Sampling())


class Ledger:
    """A book and what serves from it, with nobody to reach."""

    def __init__(self) -> None:
        self.scope: Any = SimpleNamespace(
            id=JOB,
            book=Book(JOB),
            woken=asyncio.Event(),
            keeper=SimpleNamespace(caught_up=True, epoch=1),
            seat=lambda response: None,
        )
        self.courier = Courier(cast(Scope, self.scope), History(cast(Scope, self.scope)))
        self.serving = Serving(cast(Scope, self.scope), self.courier)

    @property
    def book(self) -> Book:
        return cast(Book, self.scope.book)

    def ask(self, n: int = N) -> Answer:
        return self.serving.ask(ASKED, n=n, budget=BUDGET, news=asyncio.Event())

    def hear(self, kind: str, data: bytes) -> None:
        effects = apply(self.book, kind, data)
        for change in effects.changes:
            if change.HasField("drop") or change.HasField("retire"):
                self.serving.left(change.drop.group or change.retire.group)
        self.serving.applied([(Entry(1, kind, JOB, "w", data), effects)])

    def transition(self, changes: list[ledger_pb2.Change]) -> None:
        self.hear("ledger", ledger_pb2.Transition(epoch=1, number=1, changes=changes).SerializeToString())

    def round(self) -> list[ledger_pb2.Change]:
        """Put what is due into the log."""
        changes = [*self.serving.let_go(), *self.serving.admit()]
        self.transition(changes)
        return changes

    def assign(self, handle: int) -> None:
        serial = self.book.responses[handle].serial + 1
        value = ledger_pb2.Assign(handle=handle, attempt=attempt_of(1, serial), worker="w", incarnation=1)
        self.transition([ledger_pb2.Change(assign=value)])

    def orphan(self, handle: int) -> None:
        value = ledger_pb2.Orphan(
            handle=handle, attempt=self.book.responses[handle].attempt, reason=ledger_pb2.ORPHAN_REASON_DEAD
        )
        self.transition([ledger_pb2.Change(orphan=value)])

    def flush(self, handle: int, offset: int, ids: list[int], finish: Finish = Finish.NONE) -> None:
        span = Span(
            handle=handle,
            attempt=self.book.responses[handle].attempt,
            offset=offset,
            ids=np.array(ids, np.uint32),
            logprobs=np.full(len(ids), -1.0, np.float32),
            runs=(Run(len(ids), 0),) if ids else (),
            finish=finish,
        )
        self.hear("spans", pack(Flush(worker="w", incarnation=1, number=1, spans=(span,))))

    def copy(self) -> Book:
        """The book as the store would give it back now."""
        fields = {str(handle): snapshot.dump_response(item) for handle, item in self.book.responses.items()}
        return snapshot.load(JOB, {snapshot.JOB_FIELD: snapshot.dump_job(self.book), **fields})

    def recover(self, book: Book) -> None:
        self.scope.book = book
        self.serving.recovered()


def started(n: int = N) -> tuple[Ledger, Answer]:
    """A ledger with one answer, all of whose responses have an owner."""
    ledger = Ledger()
    answer = ledger.ask(n)
    ledger.round()
    for handle in range(FIRST_SERVED, FIRST_SERVED + n):
        ledger.assign(handle)
    return ledger, answer


def taken(answer: Answer, deltas: list[Delta]) -> dict[int, list[int]]:
    return {delta.place: delta.ids for delta in deltas}


def test_a_request_becomes_a_group_and_leaves_when_its_client_has_it() -> None:
    ledger, answer = started()
    assert ledger.courier.asked == {FIRST_SERVED: ASKED}
    ledger.flush(FIRST_SERVED, 0, [5, 6])
    ledger.flush(FIRST_SERVED + 1, 0, [7], Finish.EOS)
    assert answer.news.is_set()
    assert taken(answer, ledger.serving.take(answer)) == {0: [5, 6], 1: [7]}
    assert ledger.serving.take(answer) == []
    assert ledger.round() == []
    ledger.flush(FIRST_SERVED, 2, [], Finish.EOS)
    (last,) = ledger.serving.take(answer)
    assert (last.ids, last.finish, last.runs) == ([], Finish.EOS, (Run(2, 0),))
    ledger.serving.close(answer, complete=True)
    assert [change.WhichOneof("change") for change in ledger.round()] == ["retire"]
    assert (ledger.book.served, ledger.courier.asked) == ({}, {})
    assert ledger.book.counters["served_retired"] == N


def test_a_client_that_goes_away_drops_its_group_admitted_or_not() -> None:
    ledger, answer = started()
    never = ledger.ask()
    ledger.serving.close(never, complete=False)
    ledger.serving.close(answer, complete=False)
    assert [change.WhichOneof("change") for change in ledger.round()] == ["drop"]
    assert ledger.round() == []
    assert ledger.book.counters["served_dropped"] == ledger.book.counters["served_submitted"] == N


def test_a_group_that_nobody_here_asked_for_is_dropped_and_its_ordinal_not_used_again() -> None:
    """A coordinator takes over: the client was the one before's."""
    before, _ = started()
    after = Ledger()
    after.scope.book = before.copy()
    answer = after.ask()
    after.scope.keeper.caught_up = False
    assert [change.WhichOneof("change") for change in after.round()] == ["drop"], "admitted before the log is read"
    after.scope.keeper.caught_up = True
    after.round()
    assert answer.group == FIRST_SERVED + N


def test_an_admission_that_a_recovery_lost_is_made_again() -> None:
    ledger, answer = started()
    ledger.recover(Book(JOB))
    ledger.round()
    assert answer.group == FIRST_SERVED + N
    assert set(ledger.book.served) == {answer.group}


def test_a_completion_whose_given_tokens_are_lost_ends_with_an_error() -> None:
    ledger, answer = started()
    ledger.flush(FIRST_SERVED, 0, [5])
    ledger.serving.take(answer)
    ledger.recover(Book(JOB))
    ledger.round()
    with pytest.raises(Unavailable, match="lost this completion"):
        ledger.serving.take(answer)


@settings(deadline=None)
@given(st.integers(0, 4), st.integers(1, 4), st.booleans())
def test_after_a_recovery_nothing_is_given_twice_or_changed(kept: int, more: int, same: bool) -> None:
    """The book came back with `kept` of 4 given tokens; the rest comes again, the same or not."""
    ledger, answer = started(1)
    ids = [10, 11, 12, 13]
    ledger.flush(FIRST_SERVED, 0, ids[:kept])
    book = ledger.copy()
    ledger.flush(FIRST_SERVED, kept, ids[kept:])
    assert taken(answer, ledger.serving.take(answer)) == {0: ids}
    ledger.recover(book)
    assert ledger.serving.take(answer) == []
    again = ids[kept:] if same else [99 for _ in ids[kept:]]
    new = list(range(20, 20 + more))
    ledger.flush(FIRST_SERVED, kept, [*again, *new])
    if same or kept == len(ids):
        assert taken(answer, ledger.serving.take(answer)) == {0: new}
    else:
        with pytest.raises(Unavailable, match="lost tokens"):
            ledger.serving.take(answer)


def test_a_prompt_that_kills_worker_after_worker_is_given_up() -> None:
    ledger, answer = started()
    for _ in range(blame.SUSPECT_AFTER + blame.DROP_AFTER):
        assert ledger.round() == []
        ledger.orphan(FIRST_SERVED)
        ledger.assign(FIRST_SERVED)
    assert [change.WhichOneof("change") for change in ledger.round()] == ["drop"]
    with pytest.raises(Unavailable, match="5 workers in a row died"):
        ledger.serving.take(answer)


def test_when_the_job_stops_serving_everybody_is_told_and_everything_dropped() -> None:
    ledger, answer = started()
    waiting = ledger.ask()
    ledger.serving.end(Unavailable("The job is paused."))
    for one in (answer, waiting):
        assert one.news.is_set()
        with pytest.raises(Unavailable, match="paused"):
            ledger.serving.take(one)
        ledger.serving.close(one, complete=False)
    assert [change.WhichOneof("change") for change in ledger.round()] == ["drop"]
