"""Reward code that tries to get out of its sandbox. `trial` runs it when the service starts, as any other reward file.

The score is a sum of BREACHES: what it could do and must not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from collections.abc import Callable

from rlharvest_reward.limits import MAX_TASKS

NETWORK, READING, WRITING, SIGNALS, PROCESSES = 1, 2, 4, 8, 16
BREACHES = {
    "network": NETWORK,
    "reading": READING,
    "writing": WRITING,
    "signals": SIGNALS,
    "processes": PROCESSES,
}


def escape(solution_str: str, *, service: int, outside: str) -> float:
    """Return what it could do.

    Args:
        service: id of the service's process.
        outside: a directory that is not this function's, in which everybody may write, with a file `secret`.
    """
    tried: tuple[tuple[int, Callable[[], object]], ...] = (
        (NETWORK, lambda: socket.socket(socket.AF_INET)),
        (NETWORK, lambda: socket.socket(socket.AF_INET6)),
        (NETWORK, lambda: socket.socket(socket.AF_UNIX)),
        (READING, lambda: _read(f"{outside}/secret")),
        (READING, lambda: _read(f"/proc/{service}/environ")),
        (WRITING, lambda: _write(f"{outside}/secret")),
        (WRITING, lambda: _write(f"{outside}/new")),
        (WRITING, lambda: os.chmod(f"{outside}/secret", 0o600)),
        (WRITING, lambda: os.truncate(f"{outside}/secret", 0)),
        (SIGNALS, lambda: os.kill(service, 0)),
        (SIGNALS, lambda: os.killpg(0, 0)),
        (PROCESSES, _leave_the_group),
        (PROCESSES, _fork_beyond_limit),
    )
    breached = 0
    for breach, attempt in tried:
        with contextlib.suppress(OSError):
            attempt()
            breached |= breach
    return float(breached)


def _read(path: str) -> None:
    with open(path, "rb") as file:
        file.read(1)


def _write(path: str) -> None:
    with open(path, "ab") as file:
        file.write(b".")


def _leave_the_group() -> None:
    child = os.fork()  # a session's leader could not anyway
    if child == 0:
        with contextlib.suppress(OSError):
            os.setsid()
            os._exit(0)
        os._exit(1)
    if os.waitpid(child, 0)[1] != 0:
        raise PermissionError


def _fork_beyond_limit() -> None:
    children: list[int] = []
    try:
        for _ in range(4 * MAX_TASKS):
            child = os.fork()
            if child == 0:
                signal.pause()
            children.append(child)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
