"""Which workers to let go, and who can be let go in the middle of a step (the cut of RLHFless, arXiv 2602.22718, section 4).

Invariants (property-tested): exactly the surplus goes, as far as there is so much; a worker that is cut gives all it has to
others, none of whom gets more than it has room for; none that takes is cut, and none is cut that must stay; somebody stays.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

TAU = 0.7
"""Share of its responses that a worker has finished before it may be cut. At 0.5 and below others have no room yet."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leased:
    """A worker that may be let go."""

    worker: str
    kind: str
    tokens_per_s: float
    usd_per_hour: float
    tokens: int
    """Of the responses that it holds: what others would prefill."""
    paid_s: float = 0.0
    """Until its next increment of billing begins."""


def release(workers: Sequence[Leased], surplus: Mapping[str, int]) -> list[str]:
    """Return which workers to let go, in order.

    The dearest for what it does goes first, of equals the one that is paid ahead the least, then the one that holds least.

    Args:
        surplus: how many of each kind.
    """
    left = dict(surplus)
    chosen = []
    for one in sorted(
        workers,
        key=lambda one: (-one.usd_per_hour / max(one.tokens_per_s, 1e-9), one.paid_s, one.tokens, one.worker),
    ):
        if left.get(one.kind, 0) > 0:
            left[one.kind] -= 1
            chosen.append(one.worker)
    return chosen


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a worker is with its part of a step."""

    worker: str
    assigned: int
    """Responses that it got."""
    unfinished: tuple[int, ...]
    """Handles, the one with the most tokens to prefill first."""
    free: int
    """Responses that it could take besides."""
    may_end: bool = True
    """It can be let go: it is not reserved."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """Let a worker go in the middle of a step."""

    worker: str
    moves: tuple[tuple[int, str], ...]
    """Responses, and who goes on with them."""
    reason: str


def cut(workers: Sequence[Progress], *, tau: float = TAU) -> list[Cut]:
    """Return who can be let go now, because others have room for the little that it still has; who has least goes first.

    Args:
        tau: share of its responses that it must have finished.
    """
    free = {one.worker: one.free for one in workers}
    # The emptiest takes first; an entry counts while it says what is free now.
    heap = [(-room, name) for name, room in free.items() if room > 0]
    heapq.heapify(heap)
    room, staying = sum(free.values()), len(workers)
    takers: set[str] = set()
    cuts: list[Cut] = []
    for one in sorted(workers, key=lambda one: (len(one.unfinished), one.worker)):
        n = len(one.unfinished)
        done = one.assigned - n
        if not one.may_end or not one.assigned or done < tau * one.assigned or one.worker in takers:
            continue
        if staying == 1 or room - free[one.worker] < n:
            continue
        # It takes nothing from now on, whatever the heap says about it.
        room -= free[one.worker] + n
        free[one.worker] = 0
        staying -= 1
        moves = []
        for handle in one.unfinished:
            while -heap[0][0] != free[heap[0][1]]:
                heapq.heappop(heap)
            _, target = heap[0]
            free[target] -= 1
            if free[target]:
                heapq.heapreplace(heap, (-free[target], target))
            else:
                heapq.heappop(heap)
            takers.add(target)
            moves.append((handle, target))
        reason = f"{done} of its {one.assigned} responses are finished, and others have room for the last {n}"
        cuts.append(Cut(worker=one.worker, moves=tuple(moves), reason=reason))
    return cuts
