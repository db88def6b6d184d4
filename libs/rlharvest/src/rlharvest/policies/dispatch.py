"""Which pending response goes to which worker: the one with the least load, or one with hardly more that has its prompt.

Samples of one prompt share its prefill where they run on one worker (the deduplicated prefill of RLHFless, within an
instance), so a response prefers a worker that has its prompt already: a home. A home may be ahead of the least loaded worker
by `slack` and no more. So a group spreads as far as an even load needs, and gets another home only when those that it has
are ahead by that much.

Invariants (property-tested): no worker gets more than it has slots; none gets a response that needs a newer version than
it serves; a suspected response goes only to a worker that holds nothing else, alone; responses that are served take no more
than their share of a worker's slots; while a worker that may take it has a free slot, a response does not wait; nobody gets
a response who is ahead of another one that may take it by more than the slack; the same input gives the same answer.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

SLACK = 0.25
"""Share of its slots by which a home may be ahead, but at least one slot."""


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
    prompt: int | None = None
    """Equal for responses to one prompt; None: it shares a prompt with nobody."""


def share(slots: int) -> int:
    """Return how many slots of a worker served responses may take: half of them, so that training goes on, at least one."""
    return max(1, slots // 2)


def slack(slots: int) -> float:
    """Return how far ahead a home of so many slots may be, as a share of them."""
    return max(SLACK, 1 / slots)


def assign(
    waiting: Iterable[Waiting], workers: Sequence[Candidate], homes: Mapping[int, Collection[str]] | None = None
) -> list[tuple[int, str]]:
    """Return (handle, worker) pairs, in the order of `waiting`.

    Args:
        homes: workers that have a prompt prefilled; those that get one here are added.
    """
    known = dict(homes or {})
    queue = _Queue(workers)
    pairs = []
    for response in waiting:
        if queue.full:
            break
        there = known.get(response.prompt, ()) if response.prompt is not None else ()
        if (name := queue.choose(response, there)) is None:
            continue
        queue.give(response, name)
        pairs.append((response.handle, name))
        if response.prompt is not None and name not in there:
            known[response.prompt] = {*there, name}
    return pairs


class _Queue:
    """The workers by their load: the share of the slots, so that a large worker takes more."""

    def __init__(self, workers: Sequence[Candidate]) -> None:
        self._workers = {worker.worker: worker for worker in workers if not worker.quarantined}
        self._held = {name: worker.held for name, worker in self._workers.items()}
        self._served = {name: worker.served for name, worker in self._workers.items()}
        self._alone: set[str] = set()
        self._heap = [(self._load(name), name) for name in self._workers if self._open(name)]
        """Has every open worker with its present load, and maybe with earlier ones."""
        heapq.heapify(self._heap)

    @property
    def full(self) -> bool:
        """Whether nobody can take anything, as far as is known."""
        return not self._heap

    def choose(self, response: Waiting, homes: Collection[str]) -> str | None:
        """Return who shall get a response, or None if nobody may."""
        if (least := self._least(response)) is None or least in homes:
            return least
        load = self._load(least)
        near = [
            (self._load(name), name)
            for name in homes
            if name in self._workers
            and self._open(name)
            and self._fits(response, name)
            and self._load(name) <= load + slack(self._workers[name].slots)
        ]
        return min(near, default=(load, least))[1]

    def give(self, response: Waiting, name: str) -> None:
        """Count a response as one of a worker's."""
        self._held[name] += 1
        self._served[name] += response.served
        if response.suspected:
            self._alone.add(name)
        if self._open(name):
            heapq.heappush(self._heap, (self._load(name), name))

    def _least(self, response: Waiting) -> str | None:
        passed = []
        found = None
        while self._heap and found is None:
            load, name = heapq.heappop(self._heap)
            if load != self._load(name) or not self._open(name):
                continue
            passed.append((load, name))
            if self._fits(response, name):
                found = name
        for entry in passed:
            heapq.heappush(self._heap, entry)
        return found

    def _load(self, name: str) -> float:
        return self._held[name] / self._workers[name].slots

    def _open(self, name: str) -> bool:
        return name not in self._alone and self._held[name] < self._workers[name].slots

    def _fits(self, response: Waiting, name: str) -> bool:
        worker = self._workers[name]
        return (
            worker.step >= response.min_step
            and worker.version >= response.min_version
            and not (response.suspected and self._held[name])
            and not (response.served and self._served[name] >= share(worker.slots))
        )
