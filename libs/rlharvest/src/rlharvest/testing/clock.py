"""A clock that moves only when it is told to."""

from __future__ import annotations

import asyncio
import heapq


class FakeClock:
    """Implements rlharvest.clock.Clock; `advance` wakes who sleeps until then."""

    def __init__(self, start: float = 1_000.0) -> None:
        self._now = start
        self._sleepers: list[tuple[float, int, asyncio.Event]] = []

    def monotonic(self) -> float:
        return self._now

    def time(self) -> float:
        return self._now

    async def sleep(self, seconds: float) -> None:
        event = asyncio.Event()
        heapq.heappush(self._sleepers, (self._now + seconds, id(event), event))
        await event.wait()

    def advance(self, seconds: float) -> None:
        """Move time forward."""
        self._now += seconds
        while self._sleepers and self._sleepers[0][0] <= self._now:
            heapq.heappop(self._sleepers)[2].set()
