"""What can never be trained is found, whatever a worker or a reward function says, and named."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from rlharvest.jobs.model import parse
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import apply
from rlharvest.ledger.response import State, attempt_of
from rlharvest.spans import Finish, Flush, Run, Span, pack
from rlharvest.v1 import ledger_pb2, scores_pb2
from rlharvest_coordinator import harvest as harvest_module
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import groups

JOB, VOCAB = "rljob_x", 100
ATTEMPT = attempt_of(1, 1)
SPEC = parse({"model": "m", "dataset": {"path": "d.jsonl"}, "rewards": [{"builtin": "exact_match"}]})


def finished(*ids: int, score: scores_pb2.ScoreResult | None = None) -> Book:
    """Return a book with one finished and scored response of these tokens."""
    book = Book(JOB)
    changes = [
        ledger_pb2.Change(admit=ledger_pb2.Admit(group=0, first_handle=0, n=1, budget=100)),
        ledger_pb2.Change(assign=ledger_pb2.Assign(handle=0, attempt=ATTEMPT, worker="wkr_1", incarnation=1)),
    ]
    book.transition(ledger_pb2.Transition(epoch=1, number=1, changes=changes))
    span = Span(
        handle=0,
        attempt=ATTEMPT,
        offset=0,
        ids=np.array(ids, np.uint32),
        logprobs=np.full(len(ids), -1.0, np.float32),
        runs=(Run(len(ids), 0),),
        finish=Finish.EOS,
    )
    apply(book, "spans", pack(Flush(worker="wkr_1", incarnation=1, number=1, spans=(span,))))
    response = book.responses[0]
    assert response.state is State.FINISHED
    response.score = score or scores_pb2.ScoreResult(job=JOB, handle=0, reward=1.0)
    response.state = State.SCORED
    return book


def problem(book: Book) -> tuple[str, str, dict[str, Any]] | None:
    prepared = SimpleNamespace(tokenizer=SimpleNamespace(vocab=VOCAB))
    scope = cast(Scope, SimpleNamespace(id=JOB, spec=SPEC, book=book, prepared=prepared))
    return Harvest(scope, cast(Any, None))._problem(list(book.responses.values()))


def test_a_good_response_has_no_problem() -> None:
    assert problem(finished(1, 2, VOCAB - 1)) is None


@pytest.mark.parametrize("worst", [VOCAB, VOCAB + 5, 2**31, 2**32 - 1])
def test_a_token_that_the_tokenizer_does_not_have_is_never_trained(worst: int) -> None:
    """The head of many models is padded beyond the tokenizer, and training pushes mass there."""
    found = problem(finished(1, worst, 2))
    assert found is not None
    assert found[0] == "bad_token"
    assert f"holds token id {worst}; the tokenizer has {VOCAB} ids" in found[1]


def test_a_reward_that_failed_is_no_zero() -> None:
    score = scores_pb2.ScoreResult(job=JOB, handle=0)
    score.error.function, score.error.message, score.error.kind = "f", "it raised", "exception"
    found = problem(finished(1, score=score))
    assert found is not None
    assert (found[0], found[1]) == ("reward_error", "Reward function 'f': it raised")


async def test_a_group_that_leaves_while_another_is_written_is_not_taken_for_a_new_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its leaving was in the log already; the round that still sees it says so once more, which changes nothing."""
    book = Book(JOB)
    changes = [
        ledger_pb2.Change(admit=ledger_pb2.Admit(group=ordinal, first_handle=ordinal, n=1, budget=1))
        for ordinal in (0, 1)
    ]
    book.transition(ledger_pb2.Transition(epoch=1, number=1, changes=changes))
    for response in list(book.responses.values()):
        book._move(response, State.SCORED)
    scope = cast(Scope, SimpleNamespace(id=JOB, spec=SPEC, book=book, sessions=None, keeper=SimpleNamespace(epoch=1)))
    harvest = Harvest(scope, cast(Any, None))
    harvest._record(book.groups[1], groups.ACCEPTED)
    written = []

    async def record(_sessions: Any, row: Any, _samples: Any, *, epoch: int) -> bool:
        written.append(row.ordinal)
        leaves = ledger_pb2.Change(retire=ledger_pb2.Retire(group=1))
        book.transition(ledger_pb2.Transition(epoch=epoch, number=2, changes=[leaves]))
        return True

    monkeypatch.setattr(groups, "record", record)
    monkeypatch.setattr(
        harvest_module, "group_row", lambda _scope, group, *_, **__: SimpleNamespace(ordinal=group.ordinal)
    )
    monkeypatch.setattr(harvest_module, "sample_row", lambda *_: None)
    monkeypatch.setattr(harvest, "_problem", lambda _responses: None)
    said = await harvest.settle()
    assert written == [0]
    assert [change.retire.group for change in said] == [0, 1]
    assert harvest.running() == set()
