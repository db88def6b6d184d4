"""What has been sampled of one response: its tokens, and which version and which attempt sampled each.

Invariants: append-only; tokens lie in the form that they had on the wire, so that taking them in is one copy of their bytes;
a change of version or attempt is noted by the place at which it happens, so that tokens which change nothing cost nothing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import pairwise

from rlharvest.spans import Columns, Ids, Logprobs, Run, as_ids, as_logprobs


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive tokens that one attempt generated."""

    n: int
    attempt: int
    worker: str


@dataclass(slots=True)
class Transcript:
    """The tokens of one response so far."""

    length: int = 0
    version: int | None = None
    """Version of the newest token."""
    writer: int = 0
    """Attempt that generated the newest token; 0 without any."""
    _ids: bytearray = field(default_factory=bytearray)
    _logprobs: bytearray = field(default_factory=bytearray)
    _versions: list[tuple[int, int]] = field(default_factory=list)
    """(place of the first token, version), where the version changed."""
    _attempts: list[tuple[int, int, str]] = field(default_factory=list)
    """(place of the first token, attempt, worker), where the attempt changed."""

    @classmethod
    def restore(cls, ids: bytes, logprobs: bytes, runs: Iterable[Run], pieces: Iterable[Piece]) -> Transcript:
        """Return the transcript with these contents; `ids` and `logprobs` are little-endian."""
        found = cls(len(ids) // 4, _ids=bytearray(ids), _logprobs=bytearray(logprobs))
        place = 0
        for run in runs:
            found._note(run.version, place)
            place += run.n
        place = 0
        for piece in pieces:
            found.writer = piece.attempt
            found._attempts.append((place, piece.attempt, piece.worker))
            place += piece.n
        return found

    def append(self, columns: Columns, row: int, most: int, worker: str) -> int:
        """Append what is new in a row that starts at or below the length, at most `most` tokens; return how many."""
        length = self.length
        skip = length - columns.offsets[row]
        take = columns.counts[row] - skip
        if take > most:
            take = most
        if take <= 0:
            return 0
        start = 4 * (columns.starts[row] + skip)
        end = start + 4 * take
        self._ids += columns.ids[start:end]
        self._logprobs += columns.logprobs[start:end]
        self.length = length + take
        if columns.version is None:
            self._note_runs(columns, row, length)
        elif columns.version != self.version:
            self._note(columns.version, length)
        attempt = columns.attempts[row]
        if attempt != self.writer:
            self.writer = attempt
            self._attempts.append((length, attempt, worker))
        return take

    def _note_runs(self, columns: Columns, row: int, before: int) -> None:
        """Note the versions of a row's tokens, of those that are new: there were `before`."""
        start = columns.offsets[row]
        for n, version in columns.runs(row):
            end = start + n
            if end > before and start < self.length and version != self.version:
                self._note(version, max(start, before))
            start = end

    def _note(self, version: int, place: int) -> None:
        self.version = version
        self._versions.append((place, version))

    @property
    def ids(self) -> Ids:
        """Token ids, shape (length,)."""
        return as_ids(bytes(self._ids))

    @property
    def logprobs(self) -> Logprobs:
        """Log-probabilities, shape (length,)."""
        return as_logprobs(bytes(self._logprobs))

    def since(self, place: int) -> tuple[Ids, Logprobs]:
        """Return ids and log-probabilities from a place on, each of shape (length - place,)."""
        return as_ids(bytes(self._ids[4 * place :])), as_logprobs(bytes(self._logprobs[4 * place :]))

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of tokens of one version, in order."""
        ends = [*self._versions, (self.length, 0)]
        return tuple(Run(end - start, version) for (start, version), (end, _) in pairwise(ends))

    @property
    def pieces(self) -> list[Piece]:
        """The runs of tokens of one attempt, in order."""
        ends = [*self._attempts, (self.length, 0, "")]
        return [Piece(end - start, attempt, worker) for (start, attempt, worker), (end, _, _) in pairwise(ends)]
