"""Who gets long responses when, so that what one step makes uneven the next one evens out (HistoPipe of RhymeRL, arXiv
2508.18588, section 5).

Prompts are ranked by predicted length and cut into groups. In even steps the workers get them in ascending order, in odd
steps in descending order: a worker that ends a step late, with long responses, has short ones in the next, begins it late
and ends in time. So it needs a staleness bound of 1 or more: some workers are a step ahead of others. Longer groups get
more workers (two tiers), as many as it takes for groups to end one after the other at even distances. The last few of a
group that are much longer than predicted go to another worker, or into the next step.

Invariants (property-tested): every prompt is in exactly one group, and groups differ by one prompt at most; every worker has
exactly one group; where all groups have as many workers, the ranks of a worker's groups of two steps add up to the same for
all; no division of the workers ends earlier (exhaustive search on small cases); nothing is deferred beyond the staleness
bound, no target gets more than it has free, and no response is told two things.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

SHARE = 0.1
"""Of a group: only the last so many are stragglers (RhymeRL)."""

GROWTH = 0.9
"""Quantile of its prediction that a straggler has passed. RhymeRL's own threshold is not published."""

MARGIN = 2.0
"""A move must save so many times what it costs."""

GroupTime: TypeAlias = Callable[[int, int], float]
"""(group, workers) -> seconds until it is done; never rises with the number of workers."""


def rank(lengths: Sequence[float], groups: int) -> list[list[int]]:
    """Return `groups` groups of places in `lengths`, the shortest first; each is about equally large.

    Args:
        lengths: predicted, of each prompt.
    """
    order = sorted(range(len(lengths)), key=lambda at: (lengths[at], at))
    return [order[at * len(order) // groups : (at + 1) * len(order) // groups] for at in range(groups)]


def tiers(groups: int, workers: int, time_s: GroupTime) -> list[int]:
    """Return how many workers each group gets, at least one, so that the last of them ends as early as it can.

    Group g of G may take until T_g = T_1 + (T - T_1) g / (G - 1), where T_1 is what the first takes with one worker, or T if
    that is less: completion times grow linearly, so that the next step's groups, in the other order, begin one by one. T is
    the least for which there are workers enough; those left over go where they help most.

    Raises:
        ValueError: there are fewer workers than groups.
    """
    if workers < groups:
        raise ValueError(f"{workers} workers cannot have {groups} groups")
    if groups == 0:
        return []
    most = workers - groups + 1
    table = [[math.inf] * (most + 1) for _ in range(groups)]
    for group in range(groups):
        for count in range(1, most + 1):
            table[group][count] = min(table[group][count - 1], time_s(group, count))
    first = table[0][1]
    share = [group / (groups - 1) if groups > 1 else 1.0 for group in range(groups)]

    def need(end: float) -> list[int]:
        counts = []
        for row, part in zip(table, share, strict=True):
            allowed = min(first, end) + max(0.0, end - first) * part
            # Rows fall with the number of workers: the first that is short enough.
            counts.append(bisect.bisect_left(row, -allowed, key=lambda value: -value))
        return counts

    # The ends at which some group can do with one worker less: the answer is one of them.
    ends = sorted({end for row, part in zip(table, share, strict=True) for end in _ends(row[1:], part, first)})
    low, high = 0, len(ends) - 1
    while low < high:
        middle = (low + high) // 2
        if sum(need(ends[middle])) <= workers:
            high = middle
        else:
            low = middle + 1
    counts = need(ends[low])
    for _ in range(workers - sum(counts)):
        able = [group for group in range(groups) if counts[group] < most]
        counts[max(able, key=lambda group: (table[group][counts[group]], group))] += 1
    return counts


def _ends(times: Sequence[float], part: float, first: float) -> list[float]:
    """Return the last end for which each of these times is allowed to a group, as far as there is one."""
    ends = []
    for time in times:
        if time <= first:
            ends.append(time)
        if part > 0 and time >= first:
            # Rounding must not make an end that just does not allow it.
            ends.append((first + (time - first) / part) * (1 + 1e-12))
    return ends


def place(counts: Sequence[int], workers: Sequence[str], step: int) -> dict[str, int]:
    """Return which group each worker has in a step.

    Args:
        counts: workers of each group, from `tiers` or all alike; they add up to all workers. workers: in an order that stays
        from step to step.
    """
    turn = range(len(counts)) if step % 2 == 0 else range(len(counts) - 1, -1, -1)
    row = [group for group in turn for _ in range(counts[group])]
    return dict(zip(workers, row, strict=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """A response that is not finished."""

    handle: int
    group: int
    """Of siblings: one that is deferred takes the others of its group along."""
    worker: str
    generated: int
    """Tokens so far."""
    threshold: float
    """Tokens that it is a straggler from: the GROWTH quantile of what was predicted."""
    expected: float
    """Length that is expected now that it is so long."""
    context: int
    """Tokens to prefill where it goes: prompt and generated."""
    oldest_step: int
    """Optimizer step of the version of its oldest token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A worker that could take stragglers."""

    worker: str
    free: int
    """Responses that it can take."""
    step_s: float
    """Of a decode step, with one more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What becomes of a straggler."""

    handle: int
    kind: Literal["migrate", "defer"]
    target: str | None
    """None: the next step."""
    reason: str


def stragglers(running: Sequence[Running], size: int) -> list[Running]:
    """Return the stragglers of a group, the longest remainder first.

    Args:
        running: its responses that are not finished. size: responses that it had.
    """
    if len(running) > SHARE * size:
        return []
    late = [one for one in running if one.generated > one.threshold]
    return sorted(late, key=lambda one: (one.generated - one.expected, one.handle))


def settle(
    late: Sequence[Running],
    targets: Sequence[Target],
    *,
    step_s: Mapping[str, float],
    prefill_s: float,
    batch: int,
    max_staleness: int,
    may_defer: int,
) -> list[Action]:
    """Return what becomes of stragglers: another worker where that pays, else the next step where that is allowed.

    Args:
        step_s: of a decode step of each worker that has stragglers. prefill_s: of a token.
        batch: that they are to be in. may_defer: how many groups of siblings may be missing in it, because others take
        their places.
    """
    free = {target.worker: target.free for target in targets}
    deferred: set[int] = set()
    actions = []
    for one in late:
        here = step_s[one.worker]
        left = max(1.0, one.expected - one.generated)
        better = [
            target
            for target in targets
            if target.worker != one.worker
            and free[target.worker] > 0
            and left * (here - target.step_s) > MARGIN * prefill_s * one.context
        ]
        if better:
            target = min(better, key=lambda target: (target.step_s, target.worker))
            free[target.worker] -= 1
            saved = left * (here - target.step_s) - prefill_s * one.context
            actions.append(
                Action(
                    handle=one.handle,
                    kind="migrate",
                    target=target.worker,
                    reason=f"about {left:.0f} tokens are left; {target.worker} makes them {saved:.1f} s sooner",
                )
            )
        elif len(deferred | {one.group}) <= may_defer and batch + 1 - one.oldest_step <= max_staleness:
            deferred.add(one.group)
            actions.append(
                Action(
                    handle=one.handle,
                    kind="defer",
                    target=None,
                    reason=f"{one.generated} tokens where {one.threshold:.0f} were many, and no worker makes them sooner",
                )
            )
    return actions
