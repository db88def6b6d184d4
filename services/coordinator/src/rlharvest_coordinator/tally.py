"""What became of the groups of a job that left the ledger for SQL: which those are, and how many are in each state. Pure.

Invariants: submitted = trained + dropped + outstanding, at every point; memory grows with the groups that were dropped,
not with the job. SQL is the truth: the tally is told what SQL wrote, and made anew from SQL after a fault of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rlharvest_coordinator.ordinals import Ordinals
from rlharvest_coordinator.store.groups import DROPPED, TRAINED


class Tally:
    """The groups of one job in SQL."""

    def __init__(self) -> None:
        self._left = Ordinals()
        self._alive = Ordinals()
        self._states: Counter[str] = Counter()
        self.trained_tokens = 0

    def __contains__(self, ordinal: int) -> bool:
        """Whether a group is in SQL."""
        return ordinal in self._left

    @property
    def alive(self) -> int:
        """How many groups are in SQL and not dropped."""
        return len(self._alive)

    def record(self, ordinal: int, state: str, tokens: int = 0) -> None:
        """A group is in SQL, in this state; a tally hears of each once."""
        self._left.add(ordinal)
        self._states[state] += 1
        if state != DROPPED:
            self._alive.add(ordinal)
        if state == TRAINED:
            self.trained_tokens += tokens

    def move(self, ordinal: int, before: str, after: str, tokens: int = 0) -> None:
        """SQL took a group from one state to another. The order in which moves are told does not matter."""
        self._states[before] -= 1
        self._states[after] += 1
        if after == DROPPED:
            self._alive.remove(ordinal)
        if after == TRAINED:
            self.trained_tokens += tokens

    def dropped(self, ordinal: int) -> bool:
        """Whether a group in SQL was dropped."""
        return ordinal in self._left and ordinal not in self._alive

    def ranks(self, running: Iterable[int]) -> dict[int, int]:
        """Return the place of each running group among all that count (not dropped), in order of admission.

        Args:
            running: ordinals of the groups that are in the ledger and not in SQL.
        """
        return {ordinal: self._alive.below(ordinal) + index for index, ordinal in enumerate(sorted(running))}

    def totals(self, n: int, running: int) -> dict[str, int]:
        """Return the responses of the job by where they are, submitted = trained + dropped + outstanding, and tokens.

        Args:
            n: responses of a group.
            running: how many groups are in the ledger and not in SQL.
        """
        submitted = n * (len(self._left) + running)
        trained, dropped = n * self._states[TRAINED], n * self._states[DROPPED]
        return {
            "submitted": submitted,
            "trained": trained,
            "dropped": dropped,
            "outstanding": submitted - trained - dropped,
            "trained_tokens": self.trained_tokens,
        }
