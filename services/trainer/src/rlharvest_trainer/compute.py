"""The one thread that computes, so that the event loop never does.

Invariant: calls run one after the other in the order in which they were made; so what is saved or published after a
step is the state after that step, though nobody waited for it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import ParamSpec, TypeVar

import torch

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")


class Compute:
    """Runs functions on the computing thread.

    Args:
        threads: that torch may use; 0: as many as this process may use cores.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads or len(os.sched_getaffinity(0))
        # The number is a property of the calling thread too, not only of the process.
        self._pool = ThreadPoolExecutor(1, "compute", initializer=torch.set_num_threads, initargs=(self.threads,))

    async def __call__(
        self, function: Callable[Arguments, Result], *args: Arguments.args, **kwargs: Arguments.kwargs
    ) -> Result:
        """Return the function's result. Cancelling the wait does not stop a function that runs already."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, partial(function, *args, **kwargs))

    def close(self) -> None:
        """Take no more calls; forget those that have not begun."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def choose_device(name: str) -> torch.device:
    """Return the device that `auto`, `cpu`, `cuda`, `cuda:1`, … stands for."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)
