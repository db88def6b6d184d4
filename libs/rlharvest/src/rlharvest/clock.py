"""Time as a parameter: what decides by time takes a Clock, so that tests and the simulator can turn it.

Deadlines use `monotonic`, which never jumps; `time` is only for what people read.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


class Clock(Protocol):
    """A source of time."""

    def monotonic(self) -> float:
        """Seconds since some instant; never goes back."""
        ...

    def time(self) -> float:
        """Seconds since 1970, as the wall clock has it."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Wait."""
        ...


class SystemClock:
    """The clock of this machine."""

    def monotonic(self) -> float:
        return time.monotonic()

    def time(self) -> float:
        return time.time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
