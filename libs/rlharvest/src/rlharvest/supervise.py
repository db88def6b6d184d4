"""Run a process's background tasks so that none dies in silence.

Invariants: if any supervised task raises or returns, the process logs which one and why, and stops; SIGTERM and SIGINT
set `stopping` once and the shutdown callbacks run, in reverse order of registration, within `grace_s`; a second signal
cuts the shutdown short.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from typing import Any

import structlog

from rlharvest.errors import RlharvestError

log = structlog.get_logger(__name__)

_CANCEL_AGAIN_S = 1.0


class TaskDied(RlharvestError):
    """A background task ended though the process did not."""


async def cancel(tasks: Iterable[asyncio.Task[Any]]) -> None:
    """Cancel tasks and wait until they have ended.

    A cancellation that meets the end of what a task waits for can get lost (asyncio.wait_for in Python 3.11, on which the
    NATS client is built), so it is repeated.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        done, left = await asyncio.wait(left, timeout=_CANCEL_AGAIN_S)
        for task in done:
            if not task.cancelled():
                task.exception()  # retrieved: who cancels a task is past its faults


class Supervisor:
    """Owns the tasks of one process.

    Example::

        supervisor = Supervisor("worker")
        supervisor.spawn("heartbeats", beat())
        supervisor.on_stop(leave)
        await supervisor.run()
    """

    def __init__(self, name: str, *, grace_s: float = 25.0) -> None:
        self.name = name
        self.grace_s = grace_s
        self.stopping = asyncio.Event()
        self._tasks: dict[asyncio.Task[Any], str] = {}
        self._on_stop: list[Callable[[], Awaitable[None]]] = []
        self._failure: BaseException | None = None
        self._signals = 0

    def spawn(self, name: str, coroutine: Coroutine[Any, Any, Any], *, may_end: bool = False) -> asyncio.Task[Any]:
        """Start a task. With `may_end` its normal return is no fault; an exception always is."""
        task = asyncio.create_task(coroutine, name=f"{self.name}/{name}")
        self._tasks[task] = name
        task.add_done_callback(lambda done: self._ended(done, may_end))
        return task

    def on_stop(self, callback: Callable[[], Awaitable[None]]) -> None:
        """Call `callback` at shutdown, before the tasks are cancelled; the last one registered is called first."""
        self._on_stop.append(callback)

    def stop(self, failure: BaseException | None = None) -> None:
        """Ask the process to stop; the first failure given is what `run` raises."""
        self._failure = self._failure or failure
        self.stopping.set()

    async def run(self) -> None:
        """Wait until the process shall stop, shut down, and raise the failure if there was one."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._signalled, number)
        try:
            await self.stopping.wait()
        finally:
            await self.close()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.remove_signal_handler(number)
        if self._failure is not None:
            raise self._failure

    async def close(self) -> None:
        """Run the shutdown callbacks, then cancel the tasks and wait for them."""
        self.stopping.set()
        callbacks, self._on_stop = self._on_stop[::-1], []
        try:
            async with asyncio.timeout(self.grace_s):
                for callback in callbacks:
                    await callback()
        except TimeoutError:
            log.warning("shutdown.slow", service=self.name, grace_s=self.grace_s)
        except Exception as error:
            log.exception("shutdown.failed", service=self.name)
            self._failure = self._failure or error
        await cancel([task for task in self._tasks if task is not asyncio.current_task()])

    def _ended(self, task: asyncio.Task[Any], may_end: bool) -> None:
        name = self._tasks.pop(task, task.get_name())
        if task.cancelled() or self.stopping.is_set():
            if not task.cancelled():
                task.exception()  # retrieved: a fault while stopping is not news
            return
        error = task.exception()
        if error is None and may_end:
            return
        log.error("task.died", service=self.name, task=name, error=repr(error), exc_info=error)
        self.stop(error or TaskDied(f"background task {name!r} of {self.name} returned"))

    def _signalled(self, number: signal.Signals) -> None:
        self._signals += 1
        log.info("signal", service=self.name, signal=number.name)
        if self._signals > 1:
            self.grace_s = 0.0
        self.stop()
