"""What the operating system holds a process to: its parent's life, memory, files, processes, core dumps.

Linux has all of it; elsewhere what is missing is skipped, and the time limit still holds.
"""

from __future__ import annotations

import contextlib
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

MAX_OPEN_FILES = 256

MAX_TASKS = 128
"""Processes and threads of a sandbox."""

_MOST_TASKS = 1 << 22


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
    """Become the parent of orphaned descendants, so that whoever looks below this process finds them all."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def hide_environment() -> None:
    """Keep processes of the same user from reading this process's memory and environment through /proc."""
    _prctl(_PR_SET_DUMPABLE, 0)


def show_environment() -> None:
    """Let the parent look at this process through /proc, also after a change of user."""
    _prctl(_PR_SET_DUMPABLE, 1)


def confine(memory_mb: int) -> None:
    """Limit this process and each of its descendants to `memory_mb` MiB of address space; no core dumps."""
    _limit(resource.RLIMIT_AS, memory_mb << 20)
    _limit(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    _limit(resource.RLIMIT_NOFILE, MAX_OPEN_FILES)
    _limit(resource.RLIMIT_CORE, 0)


def confine_tasks() -> None:
    """Limit this process and its descendants to MAX_TASKS processes and threads more than its user has now.

    The kernel counts by user, over all containers of a host, of which /proc shows one: so how many there are is found out
    by starting one. The kernel does not hold root to it.
    """
    seen = _tasks_of(os.geteuid())
    if sys.platform == "linux":
        while seen < _MOST_TASKS and not _may_start(seen + 1):
            seen += MAX_TASKS
    _limit(resource.RLIMIT_NPROC, seen + MAX_TASKS)


def _limit(limit: int, value: int) -> None:
    hard = resource.getrlimit(limit)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(limit, (value, value))


def _may_start(most: int) -> bool:
    hard = resource.getrlimit(resource.RLIMIT_NPROC)[1]
    resource.setrlimit(resource.RLIMIT_NPROC, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
    try:
        child = os.fork()
    except BlockingIOError:
        return False
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return True


def _tasks_of(user: int) -> int:
    count = 0
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdecimal():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                if os.stat(f"/proc/{name}").st_uid == user:
                    count += len(os.listdir(f"/proc/{name}/task"))
    return count
