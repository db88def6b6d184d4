"""Saying what happens again and again only now and then: pure, without a clock of its own.

Invariants: the first of a kind is said at once; after that at most one of a kind is said in `every_s`; each is counted
in exactly one line: that of its kind that comes next, or what `over` returns.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Kind:
    said_at: float
    untold: int = 0


class Repeats:
    """Which of many equal messages are said.

    Args:
        every_s: how long a kind is silent after it was said.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._kinds: dict[str, _Kind] = {}

    def heard(self, kind: str, now: float) -> int:
        """Return how many of a kind the line that is due stands for, this one included; 0: none is due.

        Args:
            now: monotonic, in seconds.
        """
        known = self._kinds.get(kind)
        if known is None:
            self._kinds[kind] = _Kind(now)
            return 1
        known.untold += 1
        if now - known.said_at < self.every_s:
            return 0
        told, known.untold, known.said_at = known.untold, 0, now
        return told

    def over(self) -> int:
        """It has stopped: return how many no line stands for yet, and begin anew."""
        untold = sum(kind.untold for kind in self._kinds.values())
        self._kinds.clear()
        return untold
