"""The columnar fold of spans does what the rules say, one token at a time."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.ledger.book import Ack, Book
from rlharvest.ledger.response import State, attempt_of
from rlharvest.spans import Finish, Flush, Run, Span, pack, read
from rlharvest.v1 import ledger_pb2

BUDGET = 9
HANDLES = 3


@dataclass
class Naive:
    """The rules as one would say them, of one response."""

    attempt: int = 0
    tokens: list[tuple[int, float, int, int]] = field(default_factory=list)
    """(id, log-probability, version, attempt)."""
    finish: Finish = Finish.NONE

    def take(self, worker: str, span: Span, counters: Counter[str]) -> tuple[Ack, int]:
        n = len(span.ids)
        if span.attempt != self.attempt or self.attempt == 0 or worker != "w":
            counters["fenced_tokens"] += n
            return Ack.FENCED, len(self.tokens)
        if self.finish is not Finish.NONE:
            counters["duplicate_tokens"] += n
            return Ack.APPLIED, len(self.tokens)
        if span.offset > len(self.tokens):
            counters["gaps"] += 1
            return Ack.GAP, len(self.tokens)
        versions = [run.version for run in span.runs for _ in range(run.n)]
        rows = zip(span.ids.tolist(), span.logprobs.tolist(), versions, strict=True)
        for place, (token, logprob, version) in enumerate(rows, span.offset):
            if place == len(self.tokens) and place < BUDGET:
                self.tokens.append((token, logprob, version, span.attempt))
                counters["generated_tokens"] += 1
            else:
                counters["duplicate_tokens"] += 1
        if span.finish is not Finish.NONE and span.end == len(self.tokens):
            self.finish = span.finish
        elif len(self.tokens) == BUDGET:
            self.finish = Finish.LENGTH
        return Ack.APPLIED, len(self.tokens)


@st.composite
def spans(draw: st.DrawFn) -> Span:
    runs = tuple(draw(st.lists(st.builds(Run, n=st.integers(1, 3), version=st.integers(0, 2)), max_size=3)))
    n = sum(run.n for run in runs)
    return Span(
        handle=draw(st.integers(0, HANDLES)),
        attempt=draw(st.sampled_from([attempt_of(1, 1), attempt_of(1, 1), attempt_of(1, 2), 0])),
        offset=draw(st.integers(0, BUDGET)),
        ids=np.asarray(draw(st.lists(st.integers(0, 99), min_size=n, max_size=n)), np.uint32),
        logprobs=np.asarray(draw(st.lists(st.sampled_from([-1.0, -0.5, 0.0]), min_size=n, max_size=n)), np.float32),
        runs=runs,
        finish=draw(st.sampled_from([Finish.NONE, Finish.EOS])) if n else Finish.EOS,
    )


def move(book: Book, naive: dict[int, Naive], handle: int) -> None:
    """Take a response from its owner, if it has one, and give it to the next."""
    model = naive[handle]
    serial = model.attempt % 2**32 + 1
    orphan = ledger_pb2.Orphan(handle=handle, attempt=model.attempt)
    assign = ledger_pb2.Assign(handle=handle, attempt=attempt_of(1, serial), worker="w", incarnation=1)
    changes = [ledger_pb2.Change(orphan=orphan), ledger_pb2.Change(assign=assign)]
    book.transition(ledger_pb2.Transition(epoch=1, number=1, changes=changes))
    if model.finish is Finish.NONE:
        model.attempt = attempt_of(1, serial)


@settings(max_examples=400, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from("wwwx"), st.lists(spans(), min_size=1, max_size=6)), max_size=8),
    st.lists(st.integers(0, 7), max_size=3),
)
def test_the_fold_of_columns_is_the_rules_token_by_token(
    flushes: list[tuple[str, list[Span]]], moves: list[int]
) -> None:
    """Whatever a message holds: rows that overlap, leave gaps, cross the budget, change version, or are of an old owner."""
    book, naive = Book("job"), {handle: Naive() for handle in range(HANDLES)}
    admit = ledger_pb2.Admit(group=0, first_handle=0, n=HANDLES, budget=BUDGET)
    book.transition(ledger_pb2.Transition(epoch=1, number=1, changes=[ledger_pb2.Change(admit=admit)]))
    for handle in naive:
        move(book, naive, handle)
    counters: Counter[str] = Counter()
    for number, (worker, rows) in enumerate(flushes):
        if number in moves:
            move(book, naive, number % HANDLES)
        outcomes = book.flush(read(pack(Flush(worker=worker, incarnation=1, number=number, spans=tuple(rows)))))
        wanted = [naive.get(row.handle, Naive()).take(worker, row, counters) for row in rows]
        assert list(zip(outcomes.acks, outcomes.lengths, strict=True)) == wanted
    for handle, model in naive.items():
        response = book.responses[handle]
        assert response.ids.tolist() == [token for token, _, _, _ in model.tokens]
        assert response.logprobs.tolist() == [logprob for _, logprob, _, _ in model.tokens]
        assert [(run.n, run.version) for run in response.runs] == _runs([version for *_, version, _ in model.tokens])
        assert [(piece.n, piece.attempt) for piece in response.pieces] == _runs([token[3] for token in model.tokens])
        assert response.finish is model.finish
        assert (response.state is State.FINISHED) == (model.finish is not Finish.NONE)
    counted = ("generated_tokens", "duplicate_tokens", "fenced_tokens", "gaps")
    assert [book.counters[name] for name in counted] == [counters[name] for name in counted]


def _runs(values: list[int]) -> list[tuple[int, int]]:
    return [(len(list(same)), value) for value, same in groupby(values)]
