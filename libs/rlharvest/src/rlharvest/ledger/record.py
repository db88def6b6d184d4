"""A record of the log, applied to a book: the same call live, in recovery and on a standby.

Invariants: what does not verify is found before any of it is applied, by a rule that depends on the record alone, so that
every reader of the log comes to the same book; a record that no coordinator can have written cannot fence off those that one
will write.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from google.protobuf.message import DecodeError

from rlharvest.errors import CorruptData
from rlharvest.ledger.book import Book, Outcomes
from rlharvest.ledger.response import MAX_EPOCH, epoch_of
from rlharvest.spans import Columns, Finish, read
from rlharvest.v1 import ledger_pb2, scores_pb2

MAX_GROUP = 65_536
"""Responses of one group; a job may ask for 1024."""

_FINISHES = frozenset(finish.value for finish in Finish)

Kind = Literal["spans", "ledger", "scored"]
"""Subject kinds of the LEDGER stream."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What a record changed; empty fields where it has none."""

    flush: Columns | None = None
    outcomes: Outcomes = field(default_factory=Outcomes)
    transition: ledger_pb2.Transition | None = None
    changes: list[ledger_pb2.Change] = field(default_factory=list)
    score: scores_pb2.ScoreResult | None = None
    corrupt: str = ""
    """Why the message was not applied."""


def apply(book: Book, kind: str, data: bytes) -> Effects:
    """Apply a message. One that does not verify changes nothing but a counter: whoever sent it is told by its silence."""
    try:
        match kind:
            case "spans":
                flush = read(data)
                return Effects(flush=flush, outcomes=book.flush(flush))
            case "ledger":
                transition = ledger_pb2.Transition.FromString(data)
                _check_transition(transition)
                return Effects(transition=transition, changes=book.transition(transition))
            case "scored":
                result = scores_pb2.ScoreResult.FromString(data)
                if result.job != book.job:
                    # An empty message is a ScoreResult too: reward 0 for response 0 of no job.
                    raise CorruptData(f"a ScoreResult of job {result.job!r} came for job {book.job!r}")
                _check_score(result)
                return Effects(score=result if book.score(result) else None)
            case _:
                raise CorruptData(f"{kind!r} is not a kind of record")
    except (CorruptData, DecodeError) as error:
        book.counters["corrupt_messages"] += 1
        return Effects(corrupt=str(error))


def _check_transition(transition: ledger_pb2.Transition) -> None:
    epoch = transition.epoch
    if not 0 < epoch <= MAX_EPOCH:
        raise CorruptData(f"Transition.epoch = {epoch} is not an epoch: they go from 1 to {MAX_EPOCH}")
    for at, change in enumerate(transition.changes):
        if change.HasField("admit") and change.admit.n > MAX_GROUP:
            raise CorruptData(f"Transition.changes[{at}].admit.n = {change.admit.n} is above {MAX_GROUP}")
        if change.HasField("assign") and epoch_of(change.assign.attempt) > epoch:
            attempt = change.assign.attempt
            raise CorruptData(f"Transition.changes[{at}].assign.attempt = {attempt} is not of epoch {epoch} or before")
        if change.HasField("conclude") and change.conclude.finish not in _FINISHES:
            raise CorruptData(f"Transition.changes[{at}].conclude.finish = {change.conclude.finish} is not a finish")


def _check_score(result: scores_pb2.ScoreResult) -> None:
    if not math.isfinite(result.reward):
        raise CorruptData(f"ScoreResult.reward = {result.reward} is not finite")
    for component in result.components:
        if not (math.isfinite(component.value) and math.isfinite(component.weight)):
            raise CorruptData(f"ScoreResult.components: {component.name!r} has a value or weight that is not finite")
