"""Which machines train: AReaL-Hex's bisection on the share of FLOPS (its equation 3 and section 4.3), in whole machines.

Machines go to training in the order of how much more they are worth there, by FLOPS over memory bandwidth. As more of them
train, training gets faster and rollout slower; the bisection ends where the two cross. The exact search (solve.py) starts
from its answer, so it need look only at what could be better.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Units = tuple[int, ...]
"""How many units of each kind train."""


def order(units: Sequence[int], worth: Sequence[float]) -> list[int]:
    """Return the kinds of all units in the order in which they go to training.

    Args:
        units: of each kind that may train. worth: of each kind, training against rollout.
    """
    kinds = sorted(range(len(units)), key=lambda kind: (-worth[kind], kind))
    return [kind for kind in kinds for _ in range(units[kind])]


def bisect(
    queue: Sequence[int], kinds: int, train_s: Callable[[Units], float], rollout_s: Callable[[Units], float]
) -> list[Units]:
    """Return the partitions on both sides of where training and rollout take equally long.

    Args:
        queue: from `order`. train_s: never rises as more units train. rollout_s: never falls.
    """
    low, high = 0, len(queue)
    while high - low > 1:
        middle = (low + high) // 2
        units = prefix(queue, kinds, middle)
        if train_s(units) > rollout_s(units):
            low = middle
        else:
            high = middle
    return [prefix(queue, kinds, at) for at in (low, high) if at > 0]


def prefix(queue: Sequence[int], kinds: int, length: int) -> Units:
    """Return how many units of each kind the first `length` of the queue are."""
    counts = [0] * kinds
    for kind in queue[:length]:
        counts[kind] += 1
    return tuple(counts)
