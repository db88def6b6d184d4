"""A response and its life in the ledger.

    pending → assigned → streaming → finished → scored → (its group is retired to SQL, or dropped)
       ↑__________|___________|  orphaned: the owner is gone, the tokens stay

Invariants: a response without an owner has attempt 0; `serial` never falls, so no attempt is used twice; tokens are only
ever appended. A response that is served (its group answers a request of the gateway) is told apart by its handle, ends with
`finished`, and is never scored.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

from rlharvest.ledger.transcript import Piece, Transcript
from rlharvest.spans import Finish, Ids, Logprobs, Run
from rlharvest.v1 import scores_pb2


class State(IntEnum):
    """Where a response is in its life."""

    PENDING = 1
    """Waits for a worker."""

    ASSIGNED = 2
    """Has an owner, which sent no token yet."""

    STREAMING = 3
    """Has an owner, which sends tokens."""

    FINISHED = 4
    """All tokens are there."""

    SCORED = 5
    """Has a reward, or an error in place of one."""


OWNED = frozenset({State.ASSIGNED, State.STREAMING})

FIRST_SERVED = 2**31
"""Handles from here on, and groups of this ordinal or a higher one, are served and not trained."""

MOST_HANDLES = 2**32
"""A handle has 32 bits."""


@dataclass(slots=True)
class Response:
    """One sampled sequence while it is live."""

    handle: int
    group: int
    budget: int
    state: State = State.PENDING
    attempt: int = 0
    serial: int = 0
    """Attempts so far."""
    worker: str = ""
    incarnation: int = 0
    finish: Finish = Finish.NONE
    assigned_length: int = 0
    """Length when the present owner got it."""
    deaths: int = 0
    """Workers that died on it without notice and without a new token; any new token clears it."""
    orphaned: int = 0
    """Times it lost its owner."""
    score: scores_pb2.ScoreResult | None = None
    transcript: Transcript = field(default_factory=Transcript)

    @property
    def served(self) -> bool:
        """Whether it answers a request of the gateway and is not trained."""
        return self.handle >= FIRST_SERVED

    @property
    def owner(self) -> tuple[str, int]:
        """The worker that owns it, and its incarnation."""
        return self.worker, self.incarnation

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self.transcript.length

    @property
    def ids(self) -> Ids:
        """Token ids so far, shape (length,)."""
        return self.transcript.ids

    @property
    def logprobs(self) -> Logprobs:
        """Log-probabilities so far, shape (length,)."""
        return self.transcript.logprobs

    @property
    def runs(self) -> tuple[Run, ...]:
        """Its tokens by version, in order."""
        return self.transcript.runs

    @property
    def pieces(self) -> list[Piece]:
        """Its tokens by attempt, in order."""
        return self.transcript.pieces

    @property
    def last_version(self) -> int | None:
        """Version of the newest token."""
        return self.transcript.version

    @property
    def writer(self) -> int:
        """Attempt that generated the newest token; 0 without any."""
        return self.transcript.writer


@dataclass(frozen=True, slots=True)
class Group:
    """The responses to one prompt."""

    ordinal: int
    first_handle: int
    n: int
    budget: int
    prompt: int
    data_epoch: int

    @property
    def served(self) -> bool:
        """Whether its responses are."""
        return self.ordinal >= FIRST_SERVED

    @property
    def handles(self) -> range:
        """Handles of its responses."""
        return range(self.first_handle, self.first_handle + self.n)


MAX_EPOCH = 2**32 - 1
"""An attempt has its epoch in its upper 32 bits."""


def attempt_of(epoch: int, serial: int) -> int:
    """Return the fencing number (epoch, serial) as one u64."""
    return epoch << 32 | serial


def epoch_of(attempt: int) -> int:
    """Return the epoch in which an attempt was given."""
    return attempt >> 32
