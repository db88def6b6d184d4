"""Which responses move from one worker to another, and how many a worker is offered (RLBoost, arXiv 2510.19225, alg. 2).

Dispatch gives what waits to the shortest queue (rlharvest.policies.dispatch); this decides on what has an owner already:

- pending: a worker has more than it can start while another would start it at once;
- running: a worker's steps take so much longer than another's would, with the response in it, that what the response still
  has to generate pays for prefilling it again. On the flat part of the throughput curve a step takes as long with fewer
  responses, so nothing moves; above it, what moves costs its worker nothing.

Loads are told one worker at a time and decisions come out of two heaps, so an event costs O(log n).

Invariants (property-tested): without a new load in between, repeated calls come to an end, and no response moves twice, so
none moves back; a worker that received does not give, one that gave does not receive; a target is never filled beyond its
slots nor emptied a source; after a move the source's steps still take at least as long as the target's; versions of a
response never decrease.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

Heap: TypeAlias = list[tuple[float, str, int]]
"""(order, worker, stamp); an entry counts while the stamp is that of the worker's load."""

StepTime: TypeAlias = Callable[[str, float, float], float]
"""(kind of worker, batch, mean context) -> seconds of one decode step; 0 if nobody knows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """What one worker has."""

    worker: str
    kind: str
    """Its type: workers of one kind share a throughput table."""
    running: int
    pending: int
    """Responses that it holds and has not started."""
    slots: int
    """Responses that it can run at a time."""
    context: float = 0.0
    """Tokens of a running response, mean."""
    version: int = 0
    full: bool = False
    """Its cache of keys and values holds no more, whatever the slots say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Move:
    """Let `source` hand `n` responses over to `target`."""

    source: str
    target: str
    n: int
    running: bool
    """Whether they are running ones."""
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Constants of the balance."""

    hysteresis: float = 0.25
    """How much longer, relatively, a source's step must take than the target's."""
    prefill_s: float = 5e-5
    """Seconds that one token of a moved response takes to prefill."""
    margin: float = 2.0
    """A move must save so many times what it costs."""
    most_a_target: int = 16
    """Running responses that a worker takes at a time: each is a prefill that holds its others up."""


def bound(*, slots: int, plateau: int | None, theta: int, joining: bool) -> int:
    """Return how many responses a worker is offered: the delay of the delayed join-shortest-queue.

    While others are about to join, what is above the plateau waits for them: there it would add nothing to the worker's
    tokens/s, and would have to be prefilled again elsewhere. Otherwise a response waits nowhere as long as a slot is free.

    Args:
        plateau: batch size from which on the worker makes no more tokens/s; None if nobody knows.
        theta: how many above it nevertheless.
    """
    return min(slots, max(1, plateau + theta)) if joining and plateau is not None else slots


class Balancer:
    """The loads of all workers of a job."""

    def __init__(self, step_s: StepTime, options: Options | None = None) -> None:
        self.options = options or Options()
        self._step_s = step_s
        self._loads: dict[str, Load] = {}
        self._stamps: dict[str, int] = {}
        self._stamp = 0
        self._slowest: Heap = []
        self._fastest: Heap = []
        self._crowded: Heap = []
        self._gave: set[str] = set()
        self._received: set[str] = set()

    def __len__(self) -> int:
        return len(self._loads)

    def load(self, worker: str) -> Load:
        """Return what the worker has, after the moves that were decided."""
        return self._loads[worker]

    def update(self, load: Load) -> None:
        """Take in what a worker has now. The same as is known already changes nothing."""
        if self._loads.get(load.worker) == load:
            return
        self._gave.discard(load.worker)
        self._received.discard(load.worker)
        self._put(load)

    def remove(self, worker: str) -> None:
        """The worker is gone."""
        self._loads.pop(worker, None)
        self._stamps.pop(worker, None)
        self._gave.discard(worker)
        self._received.discard(worker)

    def moves(self, *, remaining: float, most: int = 64) -> list[Move]:
        """Return what moves now, as if it were done.

        Args:
            remaining: tokens that a running response still has to generate, mean.
            most: responses that move in this call.
        """
        moves = self._pending(most)
        moves += self._running(remaining, most - sum(move.n for move in moves))
        return moves

    def _pending(self, most: int) -> list[Move]:
        """Move what waits at one worker to another that starts it at once."""
        counts: dict[tuple[str, str], int] = {}
        while most > 0 and (source := self._top(self._crowded)) is not None:
            target = self._target(source)
            if target is None:
                break
            self._transfer(source, target, 1, running=False)
            counts[source.worker, target.worker] = counts.get((source.worker, target.worker), 0) + 1
            most -= 1
        return [
            Move(source=source, target=target, n=n, running=False, reason=f"{n} wait at {source}, {target} is free")
            for (source, target), n in counts.items()
        ]

    def _running(self, remaining: float, most: int) -> list[Move]:
        moves = []
        while most > 0 and (source := self._top(self._slowest)) is not None:
            target = self._target(source)
            if target is None or target.worker == source.worker:
                break
            n = self._worthwhile(source, target, remaining, most)
            if n < 1:
                break
            before, after = self._time(source, 0), self._time(target, n)
            self._transfer(source, target, n, running=True)
            most -= n
            times = f"{before * 1e3:.1f} ms, of {target.worker} with {n} more {after * 1e3:.1f} ms"
            reason = f"a step of {source.worker} takes {times}"
            moves.append(Move(source=source.worker, target=target.worker, n=n, running=True, reason=reason))
        return moves

    def _worthwhile(self, source: Load, target: Load, remaining: float, most: int) -> int:
        """Return how many running responses of the source it pays to move, 0 if none."""
        options = self.options
        room = target.slots - target.running - target.pending
        n = min(options.most_a_target, room, source.running - 1, most)
        while n >= 1:
            slow, left, fast = self._time(source, 0), self._time(source, -n), self._time(target, n)
            saved = remaining * (slow - fast)
            # All that moves is prefilled before any of it goes on.
            cost = n * source.context * options.prefill_s
            if slow > fast * (1 + options.hysteresis) and left >= fast and saved > options.margin * cost:
                return n
            n //= 2
        return 0

    def _transfer(self, source: Load, target: Load, n: int, *, running: bool) -> None:
        """Put down a move as done: the source gave, the target received, until an event says what they really have."""
        self._gave.add(source.worker)
        self._received.add(target.worker)
        if running:
            self._put(replace(source, running=source.running - n))
            mixed = (target.running * target.context + n * source.context) / (target.running + n)
            self._put(replace(target, running=target.running + n, context=mixed))
        else:
            self._put(replace(source, pending=source.pending - n))
            self._put(replace(target, running=target.running + n))

    def _time(self, load: Load, more: int) -> float:
        return self._step_s(load.kind, load.running + more, load.context)

    def _put(self, load: Load) -> None:
        self._stamp += 1
        self._loads[load.worker] = load
        self._stamps[load.worker] = self._stamp
        name = load.worker
        if load.running > 1 and name not in self._received:
            self._push(self._slowest, (-self._time(load, 0), name, self._stamp))
        free = load.running + load.pending < load.slots and not load.pending and not load.full
        if free and name not in self._gave:
            self._push(self._fastest, (self._time(load, 1), name, self._stamp))
        if load.pending and name not in self._received:
            self._push(self._crowded, (-load.pending, name, self._stamp))

    def _push(self, heap: Heap, entry: tuple[float, str, int]) -> None:
        heapq.heappush(heap, entry)
        if len(heap) > 64 + 4 * len(self._loads):
            heap[:] = [item for item in heap if self._stamps.get(item[1]) == item[2]]
            heapq.heapify(heap)

    def _top(self, heap: Heap) -> Load | None:
        """Return the first worker of a heap whose load is still that of the entry."""
        while heap:
            _, worker, stamp = heap[0]
            if self._stamps.get(worker) == stamp:
                return self._loads[worker]
            heapq.heappop(heap)
        return None

    def _target(self, source: Load) -> Load | None:
        """Return the worker with the shortest steps that may take a response of the source."""
        skipped: Heap = []
        found = None
        # Few versions are served at a time, so few are passed over; a bound keeps a bad case cheap.
        while len(skipped) < 32 and (target := self._top(self._fastest)) is not None:
            if target.version >= source.version and target.worker != source.worker:
                found = target
                break
            skipped.append(heapq.heappop(self._fastest))
        for entry in skipped:
            heapq.heappush(self._fastest, entry)
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A running response that may move."""

    handle: int
    length: int
    moved: int = 0
    """Times it moved so far."""


def choose(responses: Iterable[Running], n: int, *, most_moves: int = 4) -> list[int]:
    """Return the handles of the n responses that a source hands over: those that are the cheapest to prefill again."""
    able = (response for response in responses if response.moved < most_moves)
    return [item.handle for item in heapq.nsmallest(n, able, key=lambda item: (item.moved, item.length, item.handle))]


@dataclass(frozen=True, slots=True, kw_only=True)
class Straggler:
    """A running response that its batch waits for."""

    handle: int
    worker: str
    length: int
    token_s: float
    """Seconds it takes for a token where it is."""
    remaining: float
    """Tokens it has still to generate, about."""
    version: int = 0
    moved: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuge:
    """A worker with a free slot."""

    worker: str
    token_s: float
    """Seconds for a token with one response more."""
    room: int
    version: int = 0


def hedge(
    stragglers: Sequence[Straggler],
    refuges: Sequence[Refuge],
    options: Options,
    *,
    most: int = 4,
    most_moves: int = 4,
) -> list[tuple[int, str]]:
    """Return (handle, worker) for the stragglers that go on elsewhere, those that save most first.

    A response has one owner, so a hedge is not a second copy: its tokens so far are kept and the slow owner is fenced off.

    Args:
        most: how many at a time. most_moves: a response that moved so often stays.
    """
    room = {refuge.worker: refuge.room for refuge in refuges}
    order = sorted(refuges, key=lambda refuge: (refuge.token_s, refuge.worker))
    pairs: list[tuple[int, str]] = []
    slowest = sorted(stragglers, key=lambda item: (-item.remaining * item.token_s, item.handle))
    for item in slowest:
        if len(pairs) >= most:
            break
        if item.moved >= most_moves:
            continue
        for refuge in order:
            if room[refuge.worker] < 1 or refuge.worker == item.worker or refuge.version < item.version:
                continue
            saved = item.remaining * (item.token_s - refuge.token_s)
            slow = item.token_s > refuge.token_s * (1 + options.hysteresis)
            if slow and saved > options.margin * (item.length * options.prefill_s):
                room[refuge.worker] -= 1
                pairs.append((item.handle, refuge.worker))
            break
    return pairs
