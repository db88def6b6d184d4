"""Which pending response goes to which worker: join the shortest queue, by free slots.

Invariants (property-tested): no worker gets more than it has slots; none gets a response that needs a newer version than
it serves; a suspected response goes only to a worker that holds nothing else, alone; responses that are served take no more
than their share of a worker's slots; while a worker that may take it has a free slot, a response does not wait; the same
input gives the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A worker that can take responses."""

    worker: str
    slots: int
    held: int
    """Responses it owns."""
    served: int = 0
    """Of those, how many are served and not trained."""
    step: int
    """Optimizer step of the version that it serves."""
    version: int
    quarantined: bool = False
    """It runs a suspected response and must get nothing else."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """A response without an owner, in the order in which it should start."""

    handle: int
    min_step: int = 0
    """Oldest optimizer step whose version may sample it."""
    min_version: int = 0
    """Version of its newest token: versions of a response never decrease."""
    suspected: bool = False
    """Workers died on it: it runs alone."""
    served: bool = False
    """It answers a request of the gateway."""


def share(slots: int) -> int:
    """Return how many slots of a worker served responses may take: half of them, so that training goes on, at least one."""
    return max(1, slots // 2)


def assign(waiting: Iterable[Waiting], workers: Sequence[Candidate]) -> list[tuple[int, str]]:
    """Return (handle, worker) pairs, in the order of `waiting`."""
    held = {worker.worker: worker.held for worker in workers}
    served = {worker.worker: worker.served for worker in workers}
    by_name = {worker.worker: worker for worker in workers}
    # Least load first; the share of the slots, so that a large worker takes more.
    queue = [(worker.held / worker.slots, worker.worker) for worker in workers if _open(worker, worker.held)]
    heapq.heapify(queue)
    alone: set[str] = set()
    pairs = []
    for response in waiting:
        if not queue:
            break
        skipped = []
        while queue:
            load, name = heapq.heappop(queue)
            worker = by_name[name]
            fits = worker.step >= response.min_step and worker.version >= response.min_version
            if fits and response.suspected and held[name]:
                fits = False
            if fits and response.served and served[name] >= share(worker.slots):
                fits = False
            if not fits:
                skipped.append((load, name))
                continue
            held[name] += 1
            served[name] += response.served
            pairs.append((response.handle, name))
            if response.suspected:
                alone.add(name)
            if name not in alone and held[name] < worker.slots:
                skipped.append((held[name] / worker.slots, name))
            break
        for entry in skipped:
            heapq.heappush(queue, entry)
    return pairs


def _open(worker: Candidate, held: int) -> bool:
    return not worker.quarantined and held < worker.slots
