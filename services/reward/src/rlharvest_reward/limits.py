"""What the operating system holds a process to: its parent's life, memory, files, core dumps.

Linux has all of it; elsewhere what is missing is skipped, and the time limit still holds.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys

_PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE = 4
_PR_SET_CHILD_SUBREAPER = 36

MAX_FILE_BYTES = 256 << 20
"""Largest file that a reward function may write."""


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), f"prctl({option}, {value})")


def die_with_parent(parent: int) -> None:
    """Have this process killed when process `parent` ends; exit at once if it has ended already."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def adopt_orphans() -> None:
    """Become the parent of orphaned descendants, so that a kill of the whole tree finds those that left the group."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_environment() -> None:
    """Keep processes of the same user from reading this process's memory and environment through /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def confine(memory_mb: int) -> None:
    """Limit this process and each of its descendants to `memory_mb` MiB of address space; no core dumps."""
    for limit, value in (
        (resource.RLIMIT_AS, memory_mb << 20),
        (resource.RLIMIT_FSIZE, MAX_FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
