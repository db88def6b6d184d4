"""How many processor cores there are, and how many threads each torch process may have.

Two torch processes that each take all cores slow one another down by more than ten times, so every one gets an equal
share.
"""

from __future__ import annotations

import os
from pathlib import Path


def cores(quota: Path = Path("/sys/fs/cgroup/cpu.max")) -> int:
    """Return the cores that this process may use: its affinity, and the quota of its container if that is less."""
    count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        allowed, period = quota.read_text().split()
        if allowed != "max":
            count = min(count, max(1, int(allowed) // int(period)))
    except (OSError, ValueError):
        pass  # no cgroup of version 2: no quota that could be read
    return count


def threads(count: int, torch_processes: int) -> int:
    """Return the threads of each torch process: max(1, cores // processes)."""
    return max(1, count // max(1, torch_processes))
