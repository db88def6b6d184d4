"""Room on disks: how much there is, and how the operating system says that there is none.

Whoever is about to write much asks first (`require`), so that a disk is found full before it is; what fills it in
between is found by the write itself (`naming`).
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rlharvest.errors import DiskFull

Free = Callable[[Path], int]
"""Bytes that may be written below a path."""

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_FIX = "Free some, or give it a larger disk."


def free_bytes(path: Path) -> int:
    """Return the bytes that are free for this user on the disk of a path, which need not exist yet."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return shutil.disk_usage(path).free


def full(error: BaseException) -> bool:
    """Whether an error means that no more can be written: no space, over a quota, or over a file size limit.

    Libraries that write by themselves, such as safetensors, hand the system's words on in errors of their own.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in _FULL
    return any(os.strerror(number) in str(error) for number in _FULL)


def require(path: Path, needed: int, *, reserve: int, free: Free = free_bytes) -> None:
    """Check that `needed` bytes fit on the disk of a path and leave `reserve`.

    Raises:
        DiskFull: names the path, what is free and what is needed.
    """
    left = free(path)
    if left < needed + reserve:
        raise DiskFull(
            f"no space left for {path}: {left} bytes are free, {needed} are needed and {reserve} must stay free "
            f"(RLHARVEST_MIN_FREE_BYTES). {_FIX}"
        )


@contextmanager
def naming(what: object, fix: str = _FIX, *, also: tuple[type[Exception], ...] = ()) -> Iterator[None]:
    """Turn "no space left" into DiskFull that names what was being written, and the fix.

    Args:
        also: errors of libraries that write by themselves.
    """
    kinds: tuple[type[Exception], ...] = (OSError, *also)
    try:
        yield
    except kinds as error:
        if not full(error):
            raise
        problem = getattr(error, "strerror", None) or error
        raise DiskFull(f"no space left for {what} ({problem}). {fix}") from error
