"""What ends a run before its last step, and how everything that waits learns of it.

Invariants: an order is never taken back; a stronger one replaces a weaker one (fenced > cancel > pause > release);
nothing that waits through `obeying` waits on after an order, nor after a fault of what the run left to go on by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from enum import IntEnum
from typing import Any, TypeVar

Result = TypeVar("Result")


class Order(IntEnum):
    """Why a run ends early; a higher one is stronger."""

    RELEASE = 1
    """The trainer shuts down: save, let the next trainer go on."""

    PAUSE = 2
    """A user paused the job: save, let go."""

    CANCEL = 3
    """A user cancelled the job: let go."""

    FENCED = 4
    """A newer claim owns the job: say nothing more, save nothing more."""


class Stopped(Exception):
    """The run was ordered to end."""


class Orders:
    """The orders of one run. `given` may be read from any thread."""

    def __init__(self) -> None:
        self.current: Order | None = None
        self.fault: Exception | None = None
        """Of something that the run does not wait for just now."""
        self._changed = asyncio.Event()

    def given(self) -> bool:
        """Whether the run shall end."""
        return self.current is not None or self.fault is not None

    def give(self, order: Order) -> None:
        """Order the run to end."""
        if self.current is None or order > self.current:
            self.current = order
        self._changed.set()

    def fail(self, fault: Exception) -> None:
        """End the run with a fault; the first one given counts."""
        self.fault = self.fault or fault
        self._changed.set()

    async def obeying(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Return the result of `work`; when an order comes first, cancel it, wait for its end and raise Stopped.

        A fault that was given is raised instead, unless the run is ordered to end anyway.
        """
        if self.given():
            work.close()
            raise self._end()
        task = asyncio.ensure_future(work)
        order = asyncio.ensure_future(self._changed.wait())
        try:
            await asyncio.wait([task, order], return_when=asyncio.FIRST_COMPLETED)
            # What was interrupted by the order may fail before its cancellation: that is no fault.
            if task.done() and not (self.given() and task.exception() is not None):
                return task.result()
            raise self._end()
        finally:
            task.cancel()
            order.cancel()
            await asyncio.gather(task, order, return_exceptions=True)

    def _end(self) -> Exception:
        return self.fault if self.fault is not None and self.current is None else Stopped()
