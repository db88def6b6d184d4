"""Warm processes, kept by what they have loaded.

Invariants: busy + idle processes never exceed `size`; a process serves one call at a time and only calls of the key it
was started for; one that is not usable after a call is closed at once and a new one takes its place at the next call;
idle ones are closed after `idle_s`, or earlier when another key needs the place. Callers wait in order of arrival.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable
from contextlib import asynccontextmanager
from typing import Generic, Protocol, TypeVar

from rlharvest.clock import Clock, SystemClock


class Pooled(Protocol):
    """What the pool needs of a process."""

    usable: bool

    async def close(self) -> None: ...


Process = TypeVar("Process", bound=Pooled)
Key = TypeVar("Key", bound=Hashable)


class Pool(Generic[Key, Process]):
    """At most `size` processes, started by `start(key)`."""

    def __init__(
        self,
        start: Callable[[Key], Awaitable[Process]],
        *,
        size: int,
        idle_s: float,
        clock: Clock | None = None,
    ) -> None:
        self.size = size
        self.started = 0
        self.busy = 0
        self._start = start
        self._idle_s = idle_s
        self._clock = clock or SystemClock()
        self._places = asyncio.Semaphore(size)
        self._idle: list[tuple[float, Key, Process]] = []  # least recently used first
        self._closed = False

    @property
    def idle(self) -> int:
        """Processes that wait for a call."""
        return len(self._idle)

    @asynccontextmanager
    async def process(self, key: Key) -> AsyncIterator[Process]:
        """Lend a process that has loaded `key`, warm if there is one.

        Raises:
            whatever `start` raises.
        """
        async with self._places:
            self.busy += 1
            try:
                taken = self._take(key)
                if taken is None:
                    if self.busy + self.idle > self.size:
                        await self._idle.pop(0)[2].close()
                    taken = await self._start(key)
                    self.started += 1
                try:
                    yield taken
                finally:
                    if taken.usable and not self._closed:
                        self._idle.append((self._clock.monotonic(), key, taken))
                    else:
                        await taken.close()
            finally:
                self.busy -= 1

    def _take(self, key: Key) -> Process | None:
        for at in range(len(self._idle) - 1, -1, -1):
            if self._idle[at][1] == key:
                return self._idle.pop(at)[2]
        return None

    async def reap(self) -> int:
        """Close the processes that were idle for `idle_s`; return how many."""
        now = self._clock.monotonic()
        old = [process for since, _, process in self._idle if now - since >= self._idle_s]
        self._idle = [entry for entry in self._idle if now - entry[0] < self._idle_s]
        for process in old:
            await process.close()
        return len(old)

    async def close(self) -> None:
        """Close all idle processes; busy ones are closed when their call ends."""
        self._closed = True
        idle, self._idle = self._idle, []
        for _, _, process in idle:
            await process.close()
