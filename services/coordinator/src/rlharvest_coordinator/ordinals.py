"""A set of numbers that mostly follow one another, kept as its unbroken stretches. Pure.

Invariants: stretches are disjoint, in order, and never touch; memory goes with the gaps, not with the numbers, so that a
set of all that a job ever had does not grow with the job. Membership and rank take the time of a binary search, a
change near the end almost none.
"""

from __future__ import annotations

from bisect import bisect_right


class Ordinals:
    """Numbers from 0 on."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        """One behind the last number of each stretch."""
        self._before: list[int] = []
        """How many numbers lie before each stretch."""

    def __len__(self) -> int:
        return self._before[-1] + self._ends[-1] - self._starts[-1] if self._starts else 0

    def __contains__(self, number: int) -> bool:
        at = self._at(number)
        return at >= 0 and number < self._ends[at]

    @property
    def stretches(self) -> int:
        """How many unbroken stretches there are."""
        return len(self._starts)

    def below(self, number: int) -> int:
        """Return how many numbers of the set are below this one, which may be in it or not."""
        at = self._at(number)
        return self._before[at] + min(number, self._ends[at]) - self._starts[at] if at >= 0 else 0

    def add(self, number: int) -> None:
        """Take a number in; one that is there already changes nothing."""
        at = self._at(number)
        if at >= 0 and number < self._ends[at]:
            return
        after = at + 1
        follows = at >= 0 and self._ends[at] == number
        precedes = after < len(self._starts) and self._starts[after] == number + 1
        if follows and precedes:
            self._ends[at] = self._ends[after]
            self._delete(after)
        elif follows:
            self._ends[at] += 1
        elif precedes:
            self._starts[after] -= 1
        else:
            self._insert(after, number, number + 1)
        self._recount(max(at, 0))

    def remove(self, number: int) -> None:
        """Take a number out. Raises KeyError: it is not in the set."""
        at = self._at(number)
        if at < 0 or number >= self._ends[at]:
            raise KeyError(number)
        start, end = self._starts[at], self._ends[at]
        if end - start == 1:
            self._delete(at)
        elif number == start:
            self._starts[at] += 1
        else:
            self._ends[at] = number
            if number + 1 < end:
                self._insert(at + 1, number + 1, end)
        self._recount(at)

    def _at(self, number: int) -> int:
        """Return the index of the last stretch that starts at or below a number, -1 if none does."""
        return bisect_right(self._starts, number) - 1

    def _insert(self, at: int, start: int, end: int) -> None:
        self._starts.insert(at, start)
        self._ends.insert(at, end)
        self._before.insert(at, 0)

    def _delete(self, at: int) -> None:
        del self._starts[at], self._ends[at], self._before[at]

    def _recount(self, at: int) -> None:
        for index in range(at, len(self._starts)):
            last = index - 1
            self._before[index] = self._before[last] + self._ends[last] - self._starts[last] if index else 0
