"""The fold of the log keeps its promises, whatever the records."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.ledger import snapshot
from rlharvest.ledger.book import Ack, Book, Outcomes
from rlharvest.ledger.record import apply
from rlharvest.ledger.response import OWNED, State, attempt_of
from rlharvest.spans import Columns, Finish, Flush, Run, Span, pack, read
from rlharvest.v1 import ledger_pb2, scores_pb2

BUDGET = 12


def token(handle: int, position: int) -> int:
    """The one right token of a response at a position."""
    return 1000 * handle + position


def span(handle: int, attempt: int, offset: int, n: int, *, version: int = 0, finish: Finish = Finish.NONE) -> Span:
    return Span(
        handle=handle,
        attempt=attempt,
        offset=offset,
        ids=np.array([token(handle, offset + i) for i in range(n)], np.uint32),
        logprobs=np.full(n, -1.0, np.float32),
        runs=(Run(n, version),) if n else (),
        finish=finish,
    )


def packed(*spans: Span) -> bytes:
    return pack(Flush(worker="w", incarnation=1, number=1, spans=spans))


def flush(*spans: Span) -> Columns:
    return read(packed(*spans))


def only(outcomes: Outcomes) -> tuple[Ack, int]:
    """What became of the one row of a flush, and the length after it."""
    (ack,), (length,) = outcomes.acks, outcomes.lengths
    return ack, length


def change(**values: Any) -> ledger_pb2.Change:
    return ledger_pb2.Change(**values)


def transition(*changes: ledger_pb2.Change, epoch: int = 1) -> ledger_pb2.Transition:
    return ledger_pb2.Transition(epoch=epoch, number=1, changes=changes)


def admit(group: int, n: int = 2) -> ledger_pb2.Change:
    return change(admit=ledger_pb2.Admit(group=group, first_handle=group * n, n=n, budget=BUDGET))


def assign(handle: int, serial: int, *, epoch: int = 1, worker: str = "w") -> ledger_pb2.Change:
    value = ledger_pb2.Assign(handle=handle, attempt=attempt_of(epoch, serial), worker=worker, incarnation=1)
    return change(assign=value)


def orphan(handle: int, attempt: int, reason: int = ledger_pb2.ORPHAN_REASON_DEAD) -> ledger_pb2.Change:
    return change(orphan=ledger_pb2.Orphan(handle=handle, attempt=attempt, reason=reason))  # type: ignore[arg-type]  # alias


def started() -> Book:
    book = Book("job")
    book.transition(transition(admit(0), assign(0, 1), assign(1, 1)))
    return book


def test_append_needs_the_current_attempt() -> None:
    book = started()
    old = attempt_of(1, 1)
    book.transition(transition(orphan(0, old), assign(0, 2)))
    assert only(book.flush(flush(span(0, old, 0, 3)))) == (Ack.FENCED, 0)
    assert book.responses[0].length == 0
    assert book.counters["fenced_tokens"] == 3


def test_overlap_is_trimmed_and_a_gap_is_answered_with_the_length() -> None:
    book = started()
    attempt = attempt_of(1, 1)
    book.flush(flush(span(0, attempt, 0, 4)))
    assert only(book.flush(flush(span(0, attempt, 2, 4, version=3)))) == (Ack.APPLIED, 6)
    assert book.responses[0].ids.tolist() == [token(0, i) for i in range(6)]
    assert book.responses[0].runs == (Run(4, 0), Run(2, 3))
    assert only(book.flush(flush(span(0, attempt, 8, 2)))) == (Ack.GAP, 6)
    assert book.responses[0].length == 6


def test_finish_applies_even_when_trimming_leaves_no_token() -> None:
    book = started()
    attempt = attempt_of(1, 1)
    book.flush(flush(span(0, attempt, 0, 4)))
    book.flush(flush(span(0, attempt, 2, 2, finish=Finish.EOS)))
    assert book.responses[0].state is State.FINISHED
    assert book.responses[0].finish is Finish.EOS


def test_nothing_goes_past_the_budget() -> None:
    book = started()
    book.flush(flush(span(0, attempt_of(1, 1), 0, BUDGET + 5)))
    assert book.responses[0].length == BUDGET
    assert book.responses[0].finish is Finish.LENGTH


def test_transition_of_an_old_epoch_changes_nothing() -> None:
    book = started()
    book.transition(transition(change(begin=ledger_pb2.Begin()), epoch=2))
    assert book.transition(transition(orphan(0, attempt_of(1, 1)), epoch=1)) == []
    assert book.responses[0].attempt == attempt_of(1, 1)


def test_deaths_without_a_new_token_are_counted_and_any_token_clears_them() -> None:
    book = started()
    for serial in (1, 2, 3):
        book.transition(transition(orphan(0, attempt_of(1, serial)), assign(0, serial + 1)))
    assert book.responses[0].deaths == 3
    book.flush(flush(span(0, attempt_of(1, 4), 0, 1)))
    assert book.responses[0].deaths == 0


def test_a_preemption_with_notice_is_never_blamed() -> None:
    book = started()
    book.transition(transition(orphan(0, attempt_of(1, 1), ledger_pb2.ORPHAN_REASON_DRAINED)))
    assert book.responses[0].deaths == 0


def test_a_corrupt_message_changes_only_a_counter() -> None:
    book = started()
    before = snapshot.dump_job(book)
    assert apply(book, "spans", b"\xff\xff").corrupt
    assert book.counters["corrupt_messages"] == 1
    book.counters["corrupt_messages"] = 0
    assert not book.responses[0].length
    assert snapshot.load("job", {snapshot.JOB_FIELD: before}).next_group == book.next_group


def test_late_scores_are_ignored() -> None:
    book = started()
    assert not book.score(scores_pb2.ScoreResult(handle=0, reward=1.0))
    assert not book.score(scores_pb2.ScoreResult(handle=77, reward=1.0))
    assert book.counters["late_scores"] == 2


def test_a_score_of_tokens_that_were_lost_is_late() -> None:
    """The response was generated again by another attempt: the reward of its first tokens is not its reward."""
    book = started()
    entry = packed(span(0, attempt_of(1, 1), 0, 2, finish=Finish.EOS))
    apply(book, "spans", entry)
    assert not book.score(scores_pb2.ScoreResult(job="job", handle=0, attempt=attempt_of(1, 2), reward=1.0))
    assert book.counters["late_scores"] == 1
    assert book.score(scores_pb2.ScoreResult(job="job", handle=0, attempt=attempt_of(1, 1), reward=1.0))


def test_a_score_that_names_another_job_or_none_is_corrupt() -> None:
    """An empty message decodes as reward 0 for response 0: it is not trained as that."""
    book = started()
    book.flush(flush(span(0, attempt_of(1, 1), 0, 2, finish=Finish.EOS)))
    for data in (b"", scores_pb2.ScoreResult(job="other", handle=0, reward=1.0).SerializeToString()):
        assert apply(book, "scored", data).corrupt
    assert book.responses[0].state is State.FINISHED
    assert book.counters["corrupt_messages"] == 2


HANDLES = st.integers(0, 5)
SERIALS = st.integers(1, 4)
RECORDS = st.one_of(
    st.builds(lambda g: ("ledger", transition(admit(g)).SerializeToString()), st.integers(0, 2)),
    st.builds(
        lambda h, s, e: ("ledger", transition(assign(h, s), epoch=e).SerializeToString()),
        HANDLES,
        SERIALS,
        st.integers(1, 2),
    ),
    st.builds(
        lambda h, s, r: ("ledger", transition(orphan(h, attempt_of(1, s), r)).SerializeToString()),
        HANDLES,
        SERIALS,
        st.sampled_from([ledger_pb2.ORPHAN_REASON_DEAD, ledger_pb2.ORPHAN_REASON_DRAINED]),
    ),
    st.builds(
        lambda h, s, o, n, f: (
            "spans",
            packed(span(h, attempt_of(1, s), o, n, finish=f)) if n or f else packed(),
        ),
        HANDLES,
        SERIALS,
        st.integers(0, BUDGET),
        st.integers(0, 5),
        st.sampled_from([Finish.NONE, Finish.EOS]),
    ),
    st.builds(
        lambda h, s: (
            "scored",
            scores_pb2.ScoreResult(job="job", handle=h, attempt=attempt_of(1, s), reward=0.5).SerializeToString(),
        ),
        HANDLES,
        SERIALS,
    ),
    st.builds(
        lambda g: ("ledger", transition(change(drop=ledger_pb2.Drop(group=g))).SerializeToString()), st.integers(0, 2)
    ),
    st.builds(
        lambda g: ("ledger", transition(change(retire=ledger_pb2.Retire(group=g))).SerializeToString()),
        st.integers(0, 2),
    ),
    st.just(("spans", b"garbage")),
)


def check(book: Book) -> None:
    """The invariants of the book."""
    counters = book.counters
    assert counters["submitted"] == counters["retired"] + counters["dropped"] + len(book.responses)
    check_index(book)
    for response in book.responses.values():
        assert response.ids.tolist() == [token(response.handle, i) for i in range(response.length)], "lost or doubled"
        assert response.length <= response.budget
        assert sum(run.n for run in response.runs) == response.length
        assert sum(piece.n for piece in response.pieces) == response.length
        assert len(response.logprobs) == response.length
        assert (response.attempt != 0) == (response.state is not State.PENDING) or response.state not in OWNED
        if response.state is State.PENDING:
            assert response.attempt == 0
        attempts = [piece.attempt for piece in response.pieces]
        assert attempts == sorted(set(attempts)), "an attempt came back"


def check_index(book: Book) -> None:
    """The index holds what a look at every response finds."""
    responses = book.responses.values()
    for state in State:
        assert dict(book.index.within(state)) == {item.handle: item for item in responses if item.state is state}
    owners = {item.owner for item in responses if item.state in OWNED}
    assert book.index.owners().keys() == owners
    for owner in owners:
        owned = {item.handle: item for item in responses if item.state in OWNED and item.owner == owner}
        assert dict(book.index.owned_by(*owner)) == owned
    assert {item.handle for item in book.index.owned()} == {item.handle for item in responses if item.state in OWNED}
    assert book.index.blamed == {item.handle: item for item in responses if item.deaths}
    assert book.tokens == sum(item.length for item in responses)


@settings(max_examples=300, deadline=None)
@given(st.lists(RECORDS, max_size=60))
def test_whatever_the_records_no_token_is_lost_or_doubled_and_counters_add_up(records: list[tuple[str, bytes]]) -> None:
    book = Book("job")
    for kind, data in records:
        apply(book, kind, data)
        check(book)


@settings(max_examples=150, deadline=None)
@given(st.lists(RECORDS, max_size=40))
def test_applying_a_record_twice_is_the_same_as_once(records: list[tuple[str, bytes]]) -> None:
    once, twice = Book("job"), Book("job")
    for kind, data in records:
        apply(once, kind, data)
        apply(twice, kind, data)
        apply(twice, kind, data)
    assert dump(once) == dump(twice)


@settings(max_examples=150, deadline=None)
@given(st.lists(RECORDS, max_size=40), st.integers(0, 40))
def test_a_snapshot_in_the_middle_changes_nothing(records: list[tuple[str, bytes]], cut: int) -> None:
    """A book that was written and read back goes on exactly like one that was not."""
    straight, broken = Book("job"), Book("job")
    for index, (kind, data) in enumerate(records):
        if index == cut:
            fields = {str(handle): snapshot.dump_response(item) for handle, item in broken.responses.items()}
            broken = snapshot.load("job", {snapshot.JOB_FIELD: snapshot.dump_job(broken), **fields})
        apply(straight, kind, data)
        apply(broken, kind, data)
    check_index(broken)
    assert dump(straight) == dump(broken)
    assert straight.counters == broken.counters


def dump(book: Book) -> dict[str, Any]:
    """A book without its counters, comparable."""
    return {
        "groups": {ordinal: vars_of(group) for ordinal, group in book.groups.items()},
        "responses": {handle: snapshot.dump_response(item) for handle, item in book.responses.items()},
        "head": (book.epoch, book.next_group, book.ended),
    }


def vars_of(group: Any) -> tuple[int, ...]:
    return (group.ordinal, group.first_handle, group.n, group.budget, group.prompt, group.data_epoch)
