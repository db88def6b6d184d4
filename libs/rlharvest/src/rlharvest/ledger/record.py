"""A record of the log, applied to a book: the same call live, in recovery and on a standby."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from google.protobuf.message import DecodeError

from rlharvest.errors import CorruptData
from rlharvest.ledger.book import Book, Outcome
from rlharvest.spans import Flush, unpack
from rlharvest.v1 import ledger_pb2, scores_pb2

Kind = Literal["spans", "ledger", "scored"]
"""Subject kinds of the LEDGER stream."""


@dataclass(frozen=True, slots=True)
class Effects:
    """What a record changed; empty fields where it has none."""

    flush: Flush | None = None
    outcomes: list[Outcome] = field(default_factory=list)
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
                flush = unpack(data)
                return Effects(flush=flush, outcomes=book.flush(flush))
            case "ledger":
                transition = ledger_pb2.Transition.FromString(data)
                return Effects(transition=transition, changes=book.transition(transition))
            case "scored":
                result = scores_pb2.ScoreResult.FromString(data)
                if result.job != book.job:
                    # An empty message is a ScoreResult too: reward 0 for response 0 of no job.
                    raise CorruptData(f"a ScoreResult of job {result.job!r} came for job {book.job!r}")
                return Effects(score=result if book.score(result) else None)
            case _:
                raise CorruptData(f"{kind!r} is not a kind of record")
    except (CorruptData, DecodeError) as error:
        book.counters["corrupt_messages"] += 1
        return Effects(corrupt=str(error))
