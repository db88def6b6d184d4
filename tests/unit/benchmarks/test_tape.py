"""The tape of what passed over the bus: who owns what, what was published twice, what a dead worker had generated."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.ledger.response import attempt_of
from rlharvest.spans import Finish, Flush, Run, Span
from rlharvest.v1 import fleet_pb2, ledger_pb2

from benchmarks.wiretap import Owner, Tape

STEP_S = 0.01


def span(handle: int, attempt: int, offset: int, n: int, finish: Finish = Finish.NONE) -> Span:
    return Span(
        handle=handle,
        attempt=attempt,
        offset=offset,
        ids=np.zeros(n, np.uint32),
        logprobs=np.zeros(n, np.float32),
        runs=(Run(n, 0),) if n else (),
        finish=finish,
    )


def publish(tape: Tape, at: float, worker: str, *spans: Span) -> None:
    tape.flush(at, Flush(worker=worker, incarnation=1, number=1, spans=spans))


def assign(tape: Tape, handle: int, attempt: int, worker: str) -> None:
    change = ledger_pb2.Change(assign=ledger_pb2.Assign(handle=handle, attempt=attempt, worker=worker, incarnation=1))
    tape.transition(0.0, ledger_pb2.Transition(epoch=1, number=1, changes=[change]))


def orphan(tape: Tape, at: float, handle: int, attempt: int) -> None:
    change = ledger_pb2.Change(orphan=ledger_pb2.Orphan(handle=handle, attempt=attempt))
    tape.transition(at, ledger_pb2.Transition(epoch=1, number=2, changes=[change]))


def admit(tape: Tape, first: int, n: int) -> None:
    change = ledger_pb2.Change(admit=ledger_pb2.Admit(group=0, first_handle=first, n=n))
    tape.transition(0.0, ledger_pb2.Transition(epoch=1, number=1, changes=[change]))


def test_responses_wait_until_they_are_assigned_and_are_held_until_they_finish() -> None:
    tape = Tape()
    admit(tape, 0, 2)
    assert all(track.owner is None for track in tape.tracks.values())
    assign(tape, 0, 1, "a")
    assign(tape, 1, 1, "a")
    publish(tape, 1.0, "a", span(0, 1, 0, 5, Finish.EOS), span(1, 1, 0, 3))
    assert set(tape.held("a")) == {1}
    orphan(tape, 2.0, 1, 1)
    assert tape.held("a") == {}
    assert tape.orphaned == [(2.0, 1)]


def test_next_owner_starts_where_the_published_tokens_end() -> None:
    tape = Tape()
    assign(tape, 0, 1, "a")
    publish(tape, 1.0, "a", span(0, 1, 0, 7))
    orphan(tape, 2.0, 0, 1)
    assign(tape, 0, 2, "b")
    assert tape.tracks[0].owner == Owner("b", 1, 2, 7)
    assert tape.continued(0, 1) is None
    publish(tape, 3.0, "b", span(0, 2, 7, 2))
    piece = tape.continued(0, 1)
    assert piece is not None
    assert (piece.at, piece.span.offset) == (3.0, 7)
    assert tape.published(0, 1) == 7
    assert tape.first_tokens("b") == 3.0
    assert tape.first_tokens("c") is None


def test_span_of_a_former_owner_does_not_lengthen_the_response() -> None:
    tape = Tape()
    assign(tape, 0, 1, "a")
    orphan(tape, 1.0, 0, 1)
    assign(tape, 0, 2, "b")
    publish(tape, 2.0, "a", span(0, 1, 0, 9))
    assert tape.tracks[0].length == 0


@given(old=st.integers(0, 50), offset=st.integers(0, 60), n=st.integers(1, 60))
def test_tokens_that_two_attempts_published_are_counted_once_each(old: int, offset: int, n: int) -> None:
    """A repetition by the same attempt costs bandwidth, not generation: it does not count."""
    tape = Tape()
    assign(tape, 0, 1, "a")
    publish(tape, 1.0, "a", span(0, 1, 0, old))
    publish(tape, 1.0, "a", span(0, 1, 0, old))
    assign(tape, 0, 2, "b")
    publish(tape, 2.0, "b", span(0, 2, offset, n))
    assert tape.twice() == max(0, min(old, offset + n) - offset)


@given(
    start=st.floats(0, 10),
    since=st.integers(0, 100),
    flushes=st.lists(st.tuples(st.floats(0.02, 0.3), st.floats(0.0, 0.2)), min_size=1, max_size=8),
    rest_s=st.floats(0, 0.3),
)
def test_tokens_of_a_dead_engine_are_told_within_the_least_delay_of_its_flushes(
    start: float, since: int, flushes: list[tuple[float, float]], rest_s: float
) -> None:
    """An engine that makes a token every STEP_S is told from when its tokens passed, late by at most the least delay."""
    tape = Tape()
    if since:
        assign(tape, 0, 1, "z")
        publish(tape, 0.0, "z", span(0, 1, 0, since))
        orphan(tape, 0.0, 0, 1)
    assign(tape, 0, 2, "a")
    owner = tape.tracks[0].owner
    assert owner is not None
    made, at = 0, start
    for gap_s, delay_s in flushes:
        at += gap_s
        fresh = int((at - start) / STEP_S) - made
        publish(tape, at + delay_s, "a", span(0, 2, since + made, fresh))
        made += fresh
    killed = at + max(delay for _, delay in flushes) + rest_s
    truth = since + int((killed - start) / STEP_S)
    orphan(tape, killed, 0, 2)
    assign(tape, 0, 3, "b")
    publish(tape, killed + 1, "b", span(0, 3, since + made, 10_000))
    told = tape.generated(0, owner, killed, STEP_S)
    least = min(delay for _, delay in flushes)
    assert truth - (least + STEP_S) / STEP_S - 1 <= told <= truth + 1
    assert told >= tape.published(0, 2)


def test_no_more_is_regenerated_than_the_response_has() -> None:
    tape = Tape()
    assign(tape, 0, 1, "a")
    owner = tape.tracks[0].owner
    assert owner is not None
    publish(tape, 1.0, "a", span(0, 1, 0, 10))
    orphan(tape, 3.0, 0, 1)
    assign(tape, 0, 2, "b")
    publish(tape, 4.0, "b", span(0, 2, 10, 5, Finish.EOS))
    assert tape.generated(0, owner, 100.0, STEP_S) == 15


@pytest.mark.parametrize(("above", "epoch"), [(0, 1), (1, 2), (2, None)])
def test_new_assignments_are_told_from_those_that_are_sent_again(above: int, epoch: int | None) -> None:
    """By the epoch of the attempt, not of the message: a new leader sends what its predecessor may not have sent."""
    tape = Tape()
    for number in (1, 1, 2):
        assignment = fleet_pb2.Assignment(handle=3, attempt=attempt_of(number, 1))
        message = fleet_pb2.Assignments(epoch=2, assignments=[assignment])
        tape.assigned(float(number), "a", message)
    found = tape.first_handout(above=above)
    assert (found.epoch if found is not None else None) == epoch
    assert tape.epoch == 2
