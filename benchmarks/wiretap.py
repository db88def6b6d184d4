"""What passes over the bus while a benchmark runs, with the time at which it passed.

A message to a JetStream subject is a NATS message as well, so a plain subscription hears spans and transitions when the
stream gets them, without a consumer and without polling. `Tape` keeps them and answers questions; it does no I/O and reads
no clock. `Wiretap` records one from a thread of its own.

Invariants: entries are in the order of arrival; times are seconds of time.monotonic(); the tape only grows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.ledger.response import epoch_of
from rlharvest.spans import Finish, Flush, Span, unpack
from rlharvest.testing.servers import NatsServer
from rlharvest.v1 import fleet_pb2, ledger_pb2

from benchmarks.listener import Listener

T = TypeVar("T")

_KINDS: tuple[bus.Kind, ...] = ("spans", "ledger", "assign")


@dataclass(frozen=True, slots=True)
class Owner:
    """Who may append to a response."""

    worker: str
    incarnation: int
    attempt: int
    since: int
    """Tokens that the response had when it was given."""


@dataclass(frozen=True, slots=True)
class Piece:
    """A span that somebody published."""

    at: float
    worker: str
    span: Span


@dataclass(slots=True)
class Track:
    """One response."""

    owner: Owner | None = None
    pieces: list[Piece] = field(default_factory=list)
    owners: list[Owner] = field(default_factory=list)
    length: int = 0
    finished: bool = False


@dataclass(frozen=True, slots=True)
class Handout:
    """Assignments that were sent to a worker."""

    at: float
    worker: str
    attempts: tuple[int, ...]

    @property
    def epoch(self) -> int:
        """Highest epoch in which one of the attempts was given; one that is sent again keeps the epoch that it had."""
        return max(map(epoch_of, self.attempts), default=0)


class Tape:
    """Everything heard of one job."""

    def __init__(self) -> None:
        self.tracks: dict[int, Track] = {}
        self.handouts: list[Handout] = []
        self.orphaned: list[tuple[float, int]] = []
        """(time, handle) of every response that lost its owner."""

    def flush(self, at: float, flush: Flush) -> None:
        """A worker published tokens."""
        for span in flush.spans:
            track = self.tracks.setdefault(span.handle, Track())
            track.pieces.append(Piece(at, flush.worker, span))
            if track.owner is not None and track.owner.attempt == span.attempt and span.offset <= track.length:
                track.length = max(track.length, span.end)
                track.finished = track.finished or span.finish is not Finish.NONE

    def transition(self, at: float, transition: ledger_pb2.Transition) -> None:
        """The coordinator changed who owns what."""
        for change in transition.changes:
            if change.HasField("admit"):
                admit = change.admit
                for handle in range(admit.first_handle, admit.first_handle + admit.n):
                    self.tracks.setdefault(handle, Track())
            elif change.HasField("assign"):
                assign = change.assign
                track = self.tracks.setdefault(assign.handle, Track())
                track.owner = Owner(assign.worker, assign.incarnation, assign.attempt, track.length)
                track.owners.append(track.owner)
            elif change.HasField("orphan"):
                self.orphaned.append((at, change.orphan.handle))
                track = self.tracks.setdefault(change.orphan.handle, Track())
                if track.owner is not None and track.owner.attempt == change.orphan.attempt:
                    track.owner = None

    def assigned(self, at: float, worker: str, message: fleet_pb2.Assignments) -> None:
        """The coordinator sent responses to a worker."""
        self.handouts.append(Handout(at, worker, tuple(item.attempt for item in message.assignments)))

    @property
    def epoch(self) -> int:
        """Highest epoch that gave an assignment."""
        return max((handout.epoch for handout in self.handouts), default=0)

    def first_handout(self, *, above: int) -> Handout | None:
        """Return the first assignments that were made in an epoch above `above`."""
        return next((handout for handout in self.handouts if handout.epoch > above), None)

    def held(self, worker: str) -> dict[int, Owner]:
        """Return the unfinished responses that a worker owns."""
        return {
            handle: track.owner
            for handle, track in self.tracks.items()
            if track.owner is not None and track.owner.worker == worker and not track.finished
        }

    def published(self, handle: int, attempt: int) -> int:
        """Return how far an attempt got on the bus, counted from the start of its response."""
        owner = next(owner for owner in self.tracks[handle].owners if owner.attempt == attempt)
        ends = [piece.span.end for piece in self.tracks[handle].pieces if piece.span.attempt == attempt]
        return max([owner.since, *ends])

    def continued(self, handle: int, attempt: int) -> Piece | None:
        """Return the first tokens of a response by a later attempt, or None."""
        return next(
            (piece for piece in self.tracks[handle].pieces if piece.span.attempt > attempt and len(piece.span.ids)),
            None,
        )

    def first_tokens(self, worker: str) -> float | None:
        """Return when a worker first published a token."""
        times = [
            piece.at
            for track in self.tracks.values()
            for piece in track.pieces
            if piece.worker == worker and len(piece.span.ids)
        ]
        return min(times, default=None)

    def generated(self, handle: int, owner: Owner, at: float, interval_s: float) -> int:
        """Return how many tokens an engine of constant speed had made for a response at time `at`, those before included.

        Token k of an attempt exists k intervals after the engine took the response. A published token existed when it
        passed, so `time of passing - k * interval_s` is never before that moment; the least of these over all flushes is
        the closest that can be known, off by the least delay between engine and bus.
        """
        starts = [
            piece.at - (piece.span.end - owner.since) * interval_s
            for piece in self.tracks[handle].pieces
            if piece.span.attempt == owner.attempt and len(piece.span.ids)
        ]
        if not starts:
            return owner.since
        made = owner.since + int((at - min(starts)) / interval_s + 1e-6)
        return max(self.published(handle, owner.attempt), min(made, self.tracks[handle].length))

    def twice(self) -> int:
        """Return how many published tokens two attempts of a response both published."""
        total = 0
        for track in self.tracks.values():
            seen: dict[int, set[int]] = {}
            for piece in track.pieces:
                seen.setdefault(piece.span.attempt, set()).update(range(piece.span.offset, piece.span.end))
            total += sum(map(len, seen.values())) - len(set().union(*seen.values()))
        return total


class Wiretap(Listener):
    """Records the jobs of one system, in a thread of its own, until it is closed."""

    def __init__(self, server: NatsServer) -> None:
        super().__init__(server, "wiretap", [bus.subject(kind, "*", "*") for kind in _KINDS])
        self._tapes: dict[str, Tape] = {}
        self._changed = threading.Condition()

    def read(self, job: str, question: Callable[[Tape], T]) -> T:
        """Return what `question` says of the job's tape, which stands still meanwhile."""
        with self._changed:
            return question(self._tapes.setdefault(job, Tape()))

    def wait(self, job: str, done: Callable[[Tape], bool], *, timeout_s: float) -> bool:
        """Wait until `done` is true of the job's tape; return whether it was in time."""
        with self._changed:
            tape = self._tapes.setdefault(job, Tape())
            return self._changed.wait_for(lambda: done(tape), timeout_s)

    async def _hear(self, message: Msg) -> None:
        at = time.monotonic()
        kind, job, who = bus.parse_subject(message.subject)
        with self._changed:
            tape = self._tapes.setdefault(job, Tape())
            if kind == "spans":
                tape.flush(at, unpack(message.data))
            elif kind == "ledger":
                tape.transition(at, ledger_pb2.Transition.FromString(message.data))
            else:
                tape.assigned(at, who, fleet_pb2.Assignments.FromString(message.data))
            self._changed.notify_all()
