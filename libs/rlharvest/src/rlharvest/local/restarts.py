"""When a child that ended is started again: a pure rule on the times of its ends.

Invariants: the pause doubles with every end in the window, from `first_s` up to `longest_s`; more than `most` ends in
the window and the child is given up; ends older than the window are forgotten.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Policy:
    """How often, and how soon."""

    most: int = 5
    """Ends within the window that are forgiven."""
    window_s: float = 60.0
    first_s: float = 0.2
    longest_s: float = 5.0


@dataclass
class Restarts:
    """The recent ends of one child."""

    policy: Policy = field(default_factory=Policy)
    ends: deque[float] = field(default_factory=deque)

    def ended(self, now: float) -> float | None:
        """Note an end; return the seconds to wait before the next start, or None: give it up.

        Args:
            now: seconds of a monotonic clock.
        """
        while self.ends and now - self.ends[0] > self.policy.window_s:
            self.ends.popleft()
        self.ends.append(now)
        if len(self.ends) > self.policy.most:
            return None
        pause: float = min(self.policy.first_s * 2 ** (len(self.ends) - 1), self.policy.longest_s)
        return pause
