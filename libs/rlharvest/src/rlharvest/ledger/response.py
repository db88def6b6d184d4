"""A response and its life in the ledger.

    pending → assigned → streaming → finished → scored → (its group is retired to SQL, or dropped)
       ↑__________|___________|  orphaned: the owner is gone, the tokens stay

Invariants: a response without an owner has attempt 0; `serial` never falls, so no attempt is used twice; tokens are only
ever appended; version runs never decrease.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np

from rlharvest.spans import Finish, Ids, Logprobs, Run, Span, merge_runs, skip_runs
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


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that one attempt generated."""

    n: int
    attempt: int
    worker: str


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
    length: int = 0
    finish: Finish = Finish.NONE
    assigned_length: int = 0
    """Length when the present owner got it."""
    deaths: int = 0
    """Workers that died on it without notice and without a new token; any new token clears it."""
    orphaned: int = 0
    """Times it lost its owner."""
    runs: tuple[Run, ...] = ()
    pieces: list[Piece] = field(default_factory=list)
    score: scores_pb2.ScoreResult | None = None
    _ids: list[Ids] = field(default_factory=list)
    _logprobs: list[Logprobs] = field(default_factory=list)

    @property
    def ids(self) -> Ids:
        """Token ids so far, shape (length,)."""
        if len(self._ids) != 1:
            self._ids = [np.concatenate(self._ids) if self._ids else np.empty(0, np.uint32)]
        return self._ids[0]

    @property
    def logprobs(self) -> Logprobs:
        """Log-probabilities so far, shape (length,)."""
        if len(self._logprobs) != 1:
            self._logprobs = [np.concatenate(self._logprobs) if self._logprobs else np.empty(0, np.float32)]
        return self._logprobs[0]

    @property
    def last_version(self) -> int | None:
        """Version of the newest token."""
        return self.runs[-1].version if self.runs else None

    @property
    def writer(self) -> int:
        """Attempt that generated the newest token; 0 without any."""
        return self.pieces[-1].attempt if self.pieces else 0

    def restore(self, ids: Ids, logprobs: Logprobs) -> None:
        """Set the tokens of a response that comes from a snapshot."""
        self._ids, self._logprobs, self.length = [ids], [logprobs], len(ids)

    def append(self, span: Span) -> int:
        """Append what is new in a span that starts at or below the present length; return the number of new tokens."""
        skip = self.length - span.offset
        take = min(len(span.ids) - skip, self.budget - self.length)
        if take <= 0:
            return 0
        self._ids.append(span.ids[skip : skip + take])
        self._logprobs.append(span.logprobs[skip : skip + take])
        self.runs = merge_runs([*self.runs, *_first(skip_runs(span.runs, skip), take)])
        last = self.pieces[-1] if self.pieces else None
        if last is not None and last.attempt == span.attempt:
            self.pieces[-1] = Piece(last.n + take, last.attempt, last.worker)
        else:
            self.pieces.append(Piece(take, span.attempt, self.worker))
        self.length += take
        return take


def _first(runs: tuple[Run, ...], n: int) -> list[Run]:
    kept = []
    for run in runs:
        if n <= 0:
            break
        kept.append(Run(min(run.n, n), run.version))
        n -= run.n
    return kept


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
    def handles(self) -> range:
        """Handles of its responses."""
        return range(self.first_handle, self.first_handle + self.n)


def attempt_of(epoch: int, serial: int) -> int:
    """Return the fencing number (epoch, serial) as one u64."""
    return epoch << 32 | serial


def epoch_of(attempt: int) -> int:
    """Return the epoch in which an attempt was given."""
    return attempt >> 32
