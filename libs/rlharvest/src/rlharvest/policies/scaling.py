"""How many workers of which type are worth having now (RLHFless, arXiv 2602.22718, section 4).

A candidate is a number of workers of each type. Its step is simulated with the predicted lengths of the next batch and the
measured time of a decode step by batch size: responses, sorted by length, go to workers in contiguous slices of as much work
as each can do, so that workers with short ones are done early. The best candidate has the least

    lambda * time / time now + (1 - lambda) * money / money now

over the step. Money counts every worker for as long as it is held and what is reserved anyway for the same time, so
idling is paid too, and more workers stop paying off by themselves. The boot of a worker takes its share of what it can
do.

Invariants (property-tested): no candidate that was allowed has a lower score, where all were tried; a larger lambda never
gives a longer step; the present numbers are kept unless others are better by the margin.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

MOST_CANDIDATES = 256
"""Up to so many are all tried; of more, a grid, and from its best step by step to the next."""

MARGIN = 0.03
"""The present numbers stay unless the score gets better by so much."""

POINTS = 8
"""Lengths that stand for those of a slice."""

SKETCH = 512
"""Lengths that stand for those of a batch."""

Array = npt.NDArray[np.float64]


class StepTime(Protocol):
    """Seconds of a decode step of a type of worker, for a batch and its mean context in tokens."""

    def __call__(self, kind: str, batch: float, context: float, /) -> float: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A type of worker that can be had."""

    name: str
    usd_per_hour: float
    slots: int
    """Responses that one runs at a time."""
    least: int = 0
    """That are there whatever is decided."""
    most: int = 0
    """That can be had."""
    boot_s: float = 0.0
    """From the start of a lease until it works."""
    life_s: float = float("inf")
    """Expected time from the start of a lease to its end."""

    @property
    def useful(self) -> float:
        """Share of its lease in which it works."""
        return max(0.05, 1.0 - self.boot_s / self.life_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What the next step asks for."""

    lengths: Sequence[float]
    """Predicted, of all responses, in any order."""
    prompt_tokens: float
    train_s: float = 0.0
    """Of the step, without waiting."""
    overlaps: bool = True
    """Training goes on beside rollout; else after it."""
    fixed_usd_per_hour: float = 0.0
    """What is paid anyway: the trainer's machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """Numbers of workers, and what a step would be with them."""

    counts: tuple[int, ...]
    """Of each kind."""
    step_s: float
    rollout_s: float
    usd: float
    """Of a step."""
    score: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """What to have."""

    best: Candidate
    now: Candidate
    change: tuple[int, ...]
    """Workers of each kind to add, or to let go if negative."""
    reason: str


class Model:
    """The step that a number of workers would have."""

    def __init__(self, kinds: Sequence[Kind], outlook: Outlook, step_s: StepTime) -> None:
        self.kinds = tuple(kinds)
        self.outlook = outlook
        lengths = np.sort(np.maximum(np.asarray(outlook.lengths, dtype=np.float64), 1.0))
        if len(lengths) > SKETCH:
            # Means of equal parts: the sum, which is the work, stays what it is.
            edges = np.linspace(0, len(lengths), SKETCH + 1)
            sums = np.interp(edges, np.arange(len(lengths) + 1), np.concatenate([[0.0], np.cumsum(lengths)]))
            lengths, self._each = np.diff(sums) / np.diff(edges), len(lengths) / SKETCH
        else:
            self._each = 1.0
        self._lengths = lengths
        self._context = outlook.prompt_tokens + float(lengths.mean()) / 2 if len(lengths) else outlook.prompt_tokens
        self._tables = [self._table(kind, step_s) for kind in kinds]
        rates = [
            kind.useful * kind.slots / max(table[1][-1], 1e-9) for kind, table in zip(kinds, self._tables, strict=True)
        ]
        self._rates = np.array(rates)
        # Long responses go where a step is shortest.
        self._order = sorted(range(len(kinds)), key=lambda at: (-self._tables[at][1][0], at))

    def _table(self, kind: Kind, step_s: StepTime) -> tuple[Array, Array]:
        sizes = sorted({*(1 << bits for bits in range(kind.slots.bit_length())), kind.slots})
        times = np.array([step_s(kind.name, size, self._context) for size in sizes])
        return np.array(sizes, dtype=np.float64), np.maximum.accumulate(times)

    def candidate(self, counts: Sequence[int]) -> Candidate:
        """Return what a step would be with so many workers of each kind."""
        outlook = self.outlook
        rollout = self._rollout_s(counts)
        step = max(rollout, outlook.train_s) if outlook.overlaps else rollout + outlook.train_s
        price = outlook.fixed_usd_per_hour
        for kind, count in zip(self.kinds, counts, strict=True):
            price += kind.usd_per_hour * count
        return Candidate(counts=tuple(counts), step_s=step, rollout_s=rollout, usd=price * step / 3600)

    def _rollout_s(self, counts: Sequence[int]) -> float:
        if not len(self._lengths):
            return 0.0
        if not any(counts):
            return float("inf")
        order = np.repeat(self._order, [counts[kind] for kind in self._order])
        speed = self._rates[order]
        work = np.concatenate([[0.0], np.cumsum(self._lengths)])
        # Contiguous slices of the sorted lengths, each with its share of the work.
        cuts = np.interp(
            np.concatenate([[0.0], np.cumsum(speed) / speed.sum()]) * work[-1], work, np.arange(len(work), dtype=float)
        )
        slowest = 0.0
        for kind in np.unique(order).tolist():
            mine = order == kind
            slowest = max(slowest, float(self._slices_s(kind, cuts[:-1][mine], cuts[1:][mine]).max()))
        return slowest

    def _slices_s(self, kind: int, begin: Array, end: Array) -> Array:
        """Return the seconds that a worker takes for each slice of responses; its batch gets smaller as they end."""
        sizes, times = self._tables[kind]
        places = begin[:, None] + (end - begin)[:, None] * (np.arange(POINTS) + 0.5) / POINTS
        lengths = np.interp(places, np.arange(len(self._lengths)) + 0.5, self._lengths)
        # At least the longest of a slice ends last.
        lengths[:, -1] = np.maximum(lengths[:, -1], self._lengths[np.ceil(end).astype(int).clip(1) - 1])
        count = np.maximum((end - begin) * self._each, 1e-9)
        slots = float(sizes[-1])
        batch = np.minimum(count, slots)
        # What does not fit at once is done at a full batch first.
        waves = (count - batch) * lengths.mean(axis=1) * times[-1] / slots
        left = 1.0 - np.arange(POINTS) / POINTS
        step = np.interp(np.maximum(batch[:, None] * left, 1.0), sizes, times)
        last = (np.diff(lengths, axis=1, prepend=0.0) * step).sum(axis=1)
        return np.asarray((waves + last) / self.kinds[kind].useful)


def advise(
    kinds: Sequence[Kind],
    outlook: Outlook,
    step_s: StepTime,
    *,
    now: Sequence[int],
    weight: float = 0.5,
    margin: float = MARGIN,
) -> Advice:
    """Return the numbers of workers to have.

    Args:
        now: workers of each kind at present. weight: lambda: 1 counts time alone, 0 money alone.
        margin: the present numbers stay unless the score gets better by so much, relatively.

    Raises:
        ValueError: `weight` is not between 0 and 1, or no worker at all can be had.
    """
    if not 0 <= weight <= 1:
        raise ValueError(f"weight is {weight}: give a number between 0 (money alone) and 1 (time alone)")
    if not any(kind.most for kind in kinds):
        raise ValueError("no worker can be had: `most` is 0 for every kind")
    model = Model(kinds, outlook, step_s)
    # The numbers at present may be outside of what can be had by now, and there may be none.
    held = tuple(min(max(count, kind.least), kind.most) for count, kind in zip(now, kinds, strict=True))
    present = model.candidate(now)
    reference = present if any(now) else model.candidate([kind.most for kind in kinds])

    def scored(counts: Sequence[int]) -> Candidate:
        found = model.candidate(counts)
        time = found.step_s / reference.step_s if reference.step_s else 0.0
        money = found.usd / reference.usd if reference.usd else 0.0
        # Infinity times nothing is not a number, and nobody to roll out is never an answer.
        score = float("inf") if found.step_s == float("inf") else weight * time + (1 - weight) * money
        return Candidate(
            counts=found.counts, step_s=found.step_s, rollout_s=found.rollout_s, usd=found.usd, score=score
        )

    best = _search(kinds, held, scored)
    current = scored(now)
    if held == tuple(now) and best.score > current.score * (1 - margin):
        best = current
    change = tuple(wanted - have for wanted, have in zip(best.counts, now, strict=True))
    return Advice(best=best, now=current, change=change, reason=_reason(kinds, best, current, outlook, change))


class _Scored(Protocol):
    def __call__(self, counts: Sequence[int], /) -> Candidate: ...


def _search(kinds: Sequence[Kind], held: tuple[int, ...], scored: _Scored) -> Candidate:
    """Return the candidate with the least score: the fewest workers of those that have it."""
    ranges = [range(kind.least, max(kind.least, kind.most) + 1) for kind in kinds]
    every = 1
    for each in ranges:
        every *= len(each)
    if every <= MOST_CANDIDATES:
        return min(map(scored, itertools.product(*ranges)), key=lambda found: (found.score, sum(found.counts)))
    seen: dict[tuple[int, ...], Candidate] = {}

    def ask(counts: tuple[int, ...]) -> Candidate:
        if counts not in seen:
            seen[counts] = scored(counts)
        return seen[counts]

    def order(found: Candidate) -> tuple[float, int]:
        return found.score, sum(found.counts)

    # Each kind alone beside what is there anyway, then moves of one kind from the best so far.
    least = tuple(each.start for each in ranges)
    starts = {held, *((*least[:at], n, *least[at + 1 :]) for at, each in enumerate(ranges) for n in _grid(each))}
    best = min(map(ask, sorted(starts)), key=order)
    while True:
        near = [
            (*best.counts[:at], n, *best.counts[at + 1 :])
            for at, each in enumerate(ranges)
            for n in _near(each, best.counts[at])
        ]
        found = min(map(ask, near), key=order)
        if order(found) >= order(best):
            return best
        best = found


def _grid(numbers: range) -> list[int]:
    steps = {numbers.start, numbers.stop - 1}
    width = 1.0
    while numbers.start + width < numbers.stop:
        steps.add(numbers.start + int(width))
        width *= 1.5
    return sorted(steps)


def _near(numbers: range, at: int) -> list[int]:
    moves = {at + sign * (1 << bits) for bits in range(len(numbers).bit_length()) for sign in (1, -1)}
    return sorted(n for n in moves if n in numbers) or [at]


def _reason(kinds: Sequence[Kind], best: Candidate, now: Candidate, outlook: Outlook, change: Sequence[int]) -> str:
    if not any(change):
        return f"a step of {now.step_s:.1f} s for ${now.usd:.4f} is as good as any, or nearly"
    moves = ", ".join(f"{n:+d} {kind.name}" for kind, n in zip(kinds, change, strict=True) if n)
    if now.step_s == float("inf"):
        return f"{moves}: nothing rolls out now; a step would take {best.step_s:.1f} s for ${best.usd:.4f}"
    why = f"{moves}: a step of {best.step_s:.1f} s for ${best.usd:.4f} instead of {now.step_s:.1f} s for ${now.usd:.4f}"
    if outlook.overlaps and best.rollout_s <= outlook.train_s:
        return f"{why}; training is what the step waits for then"
    return why
