"""Groups that are served lie in the same book as those that are trained, and change nothing of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.ledger import snapshot
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import apply
from rlharvest.ledger.response import FIRST_SERVED, MOST_HANDLES, OWNED, State, attempt_of
from rlharvest.spans import Finish, Flush, Run, Span, pack
from rlharvest.v1 import ledger_pb2, scores_pb2

N, BUDGET = 2, 8
OWN = ("submitted", "retired", "dropped", "finished")
SERVED = ("served_submitted", "served_retired", "served_dropped", "served_tokens")

Record = tuple[str, bytes]


def transition(**change: Any) -> Record:
    changes = [ledger_pb2.Change(**change)]
    return "ledger", ledger_pb2.Transition(epoch=1, number=1, changes=changes).SerializeToString()


def admit(group: int, n: int = N, first: int | None = None) -> Record:
    handle = first if first is not None else group if group >= FIRST_SERVED else group * n
    return transition(admit=ledger_pb2.Admit(group=group, first_handle=handle, n=n, budget=BUDGET))


def assign(handle: int, serial: int) -> Record:
    return transition(assign=ledger_pb2.Assign(handle=handle, attempt=attempt_of(1, serial), worker="w", incarnation=1))


def orphan(handle: int, serial: int) -> Record:
    return transition(orphan=ledger_pb2.Orphan(handle=handle, attempt=attempt_of(1, serial)))


def flush(*parts: tuple[int, int, int, int, Finish]) -> Record:
    spans = tuple(
        Span(
            handle=handle,
            attempt=attempt_of(1, serial),
            offset=offset,
            ids=np.arange(offset, offset + n, dtype=np.uint32),
            logprobs=np.full(n, -1.0, np.float32),
            runs=(Run(n, 0),) if n else (),
            finish=finish,
        )
        for handle, serial, offset, n, finish in parts
    )
    return "spans", pack(Flush(worker="w", incarnation=1, number=1, spans=spans))


def score(handle: int, serial: int) -> Record:
    result = scores_pb2.ScoreResult(job="job", handle=handle, attempt=attempt_of(1, serial), reward=0.5)
    return "scored", result.SerializeToString()


def records(first_group: int, first_handle: int, step: int) -> st.SearchStrategy[Record]:
    """Records of three groups, `step` ordinals apart."""
    groups = st.integers(0, 2).map(lambda at: first_group + at * step)
    handles = st.integers(0, 3 * N - 1).map(lambda at: first_handle + at)
    serials = st.integers(1, 3)
    finishes = st.sampled_from([Finish.NONE, Finish.EOS])
    part = st.tuples(handles, serials, st.integers(0, BUDGET), st.integers(1, 4), finishes)
    return st.one_of(
        groups.map(admit),
        st.builds(assign, handles, serials),
        st.builds(orphan, handles, serials),
        part.map(flush),
        st.builds(score, handles, serials),
        groups.map(lambda group: transition(drop=ledger_pb2.Drop(group=group))),
        groups.map(lambda group: transition(retire=ledger_pb2.Retire(group=group))),
    )


TRAINED = records(0, 0, 1)
SERVING = records(FIRST_SERVED, FIRST_SERVED, N)
MIXED = st.lists(st.one_of(TRAINED.map(lambda record: (False, record)), SERVING.map(lambda record: (True, record))))


def trained(book: Book) -> dict[str, Any]:
    """All that training sees of a book."""
    return {
        "groups": book.groups,
        "next": book.next_group,
        "states": {state: sorted(book.index.within(state)) for state in State},
        "responses": {
            handle: snapshot.dump_response(response)
            for handle, response in book.responses.items()
            if handle < FIRST_SERVED
        },
        "counters": {name: book.counters[name] for name in OWN},
    }


def check(book: Book) -> None:
    """Counters add up, and the index holds what a look at every response finds."""
    served = {handle: response for handle, response in book.responses.items() if handle >= FIRST_SERVED}
    counters = book.counters
    left = counters["served_retired"] + counters["served_dropped"]
    assert counters["served_submitted"] == left + len(served)
    assert counters["submitted"] == counters["retired"] + counters["dropped"] + len(book.responses) - len(served)
    assert book.index.served == served
    assert {item.handle for item in book.index.owned()} == {
        handle for handle, response in book.responses.items() if response.state in OWNED
    }
    assert set(book.served) == {response.group for response in served.values()}
    assert not any(response.state is State.SCORED for response in served.values())
    assert all(book.group(response.group).ordinal == response.group for response in book.responses.values())
    assert book.tokens == sum(response.length for response in book.responses.values())
    assert all(response.ids.tolist() == list(range(response.length)) for response in served.values())


@settings(max_examples=300, deadline=None)
@given(MIXED)
def test_whatever_is_served_training_has_the_same_book(mixed: list[tuple[bool, Record]]) -> None:
    both, alone = Book("job"), Book("job")
    for served, record in mixed:
        apply(both, *record)
        if not served:
            apply(alone, *record)
        check(both)
    assert trained(both) == trained(alone)


@settings(max_examples=150, deadline=None)
@given(MIXED, st.integers(0, 30))
def test_a_snapshot_in_the_middle_changes_nothing(mixed: list[tuple[bool, Record]], cut: int) -> None:
    straight, broken = Book("job"), Book("job")
    for at, (_, record) in enumerate(mixed):
        if at == cut:
            fields = {str(handle): snapshot.dump_response(item) for handle, item in broken.responses.items()}
            broken = snapshot.load("job", {snapshot.JOB_FIELD: snapshot.dump_job(broken), **fields})
            check(broken)
        apply(straight, *record)
        apply(broken, *record)
    assert trained(straight) == trained(broken)
    assert (straight.served, straight.next_served) == (broken.served, broken.next_served)
    assert {name: straight.counters[name] for name in SERVED} == {name: broken.counters[name] for name in SERVED}


def test_no_ordinal_is_served_twice_and_ranges_do_not_overlap() -> None:
    book = Book("job")
    assert apply(book, *admit(FIRST_SERVED)).changes
    assert apply(book, *transition(drop=ledger_pb2.Drop(group=FIRST_SERVED))).changes
    assert not apply(book, *admit(FIRST_SERVED)).changes, "an ordinal came back"
    assert not apply(book, *admit(FIRST_SERVED + 1)).changes, "its first handle was another group's"
    assert not apply(book, *admit(FIRST_SERVED + 4, first=8)).changes, "a served group with handles of training"
    assert not apply(book, *admit(5, first=FIRST_SERVED + 8)).changes, "a trained group with handles that are served"
    assert not apply(book, *admit(MOST_HANDLES - 1)).changes, "a handle beyond 32 bits"
    assert apply(book, *admit(FIRST_SERVED + N)).changes


def test_an_end_lets_go_of_both() -> None:
    book = Book("job")
    for record in (admit(0), admit(FIRST_SERVED), assign(FIRST_SERVED, 1)):
        apply(book, *record)
    apply(book, *flush((FIRST_SERVED, 1, 0, 3, Finish.EOS)))
    apply(book, *transition(end=ledger_pb2.End(reason="done")))
    check(book)
    assert (book.counters["dropped"], book.counters["served_dropped"]) == (N, N)
    assert book.counters["served_tokens"] == 3
    assert not book.responses
