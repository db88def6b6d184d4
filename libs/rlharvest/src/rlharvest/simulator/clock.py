"""Virtual time: a heap of events.

Invariants: time never runs back; events of one instant happen in the order in which they were set; so a run is a function
of its scenario and seed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

Action = Callable[[], None]


class Clock:
    """Seconds since the start of the run, and what happens when."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = 0
        """Events that happened."""
        self._heap: list[tuple[float, int, Action]] = []
        self._set = 0
        self._ended = False

    def at(self, time: float, action: Action) -> None:
        """Let something happen at a time; what is set for the past happens now."""
        self._set += 1
        heapq.heappush(self._heap, (max(time, self.now), self._set, action))

    def after(self, seconds: float, action: Action) -> None:
        """Let something happen in so many seconds."""
        self.at(self.now + seconds, action)

    def end(self) -> None:
        """Let nothing more happen."""
        self._ended = True

    def run(self, *, until: float, most_events: int | None = None) -> bool:
        """Let things happen; return whether `end` was called, not that time, the events or `most_events` ran out."""
        last = None if most_events is None else self.events + most_events
        while self._heap and not self._ended and self._heap[0][0] <= until:
            if last is not None and self.events >= last:
                return False
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()
        return self._ended

    @property
    def next_s(self) -> float:
        """When the next event is, or infinity."""
        return self._heap[0][0] if self._heap else math.inf

    @property
    def over(self) -> bool:
        """Whether nothing is set any more, or `end` was called."""
        return self._ended or not self._heap


class Timer:
    """One event that can be set anew: only the newest setting happens."""

    def __init__(self, clock: Clock, action: Action) -> None:
        self._clock = clock
        self._action = action
        self._setting = 0

    def at(self, time: float) -> None:
        """Let it happen at this time instead of the one that was set."""
        self._setting += 1
        setting = self._setting
        self._clock.at(time, lambda: self._fire(setting))

    def cancel(self) -> None:
        """Let it not happen."""
        self._setting += 1

    def _fire(self, setting: int) -> None:
        if setting == self._setting:
            self._action()
