"""The processor as a benchmark needs it: how long an import takes on it now, and how to keep all of it busy."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

from benchmarks.report import MEASUREMENTS


def import_seconds(module: str, n: int = MEASUREMENTS) -> list[float]:
    """Return how long `n` fresh interpreters take from their start to the end of importing a module, in seconds."""
    taken = []
    for _ in range(n):
        start = time.monotonic()
        subprocess.run([sys.executable, "-c", f"import {module}"], check=True, stdin=subprocess.DEVNULL)
        taken.append(time.monotonic() - start)
    return taken


@contextmanager
def busy(per_core: int = 2) -> Iterator[None]:
    """Run `per_core` processes for each processor that this one may use, none of which ever waits."""
    burners = [
        subprocess.Popen([sys.executable, "-c", "while True: pass"], stdin=subprocess.DEVNULL)
        for _ in range(per_core * len(os.sched_getaffinity(0)))
    ]
    try:
        yield
    finally:
        for burner in burners:
            burner.kill()
        for burner in burners:
            burner.wait()
