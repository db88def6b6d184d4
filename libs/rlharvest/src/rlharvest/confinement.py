"""Files that others may put there, read only where they really lie: below one of some directories, links followed.

Invariants: what is read was below a root when it was open: the check comes after the opening and is made of the file that
was opened, so that a link that is turned around in between gives nothing (but hard links, which whoever owns a file can
make).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence
from pathlib import Path

from rlharvest.errors import CorruptData


def inside(path: Path, roots: Sequence[Path]) -> bool:
    """Return whether `path`, with its symbolic links followed, lies under one of `roots`."""
    real = path.resolve()
    return any(real.is_relative_to(root.resolve()) for root in roots)


def strays(directory: Path, roots: Sequence[Path]) -> list[str]:
    """Return the names of the links in a directory that lead outside of the roots."""
    entries = sorted(directory.iterdir()) if directory.is_dir() else []
    return [entry.name for entry in entries if entry.is_symlink() and not inside(entry, roots)]


def read(path: Path, roots: Sequence[Path], *, most: int) -> bytes:
    """Return the content of a regular file below one of the roots.

    Args:
        most: bytes that it may have.

    Raises:
        CorruptData: it lies outside, is no regular file, or is larger.
        OSError: it cannot be opened or read.
    """
    # A pipe would keep the opening waiting.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        opened = os.fstat(descriptor)
        real = path.resolve()
        try:
            same = os.path.samestat(opened, os.stat(real, follow_symlinks=False))
        except FileNotFoundError:
            same = False
        if not same or not any(real.is_relative_to(root.resolve()) for root in roots):
            raise CorruptData(f"{path.name} leads outside of the directories that jobs may use")
        if not stat.S_ISREG(opened.st_mode):
            raise CorruptData(f"{path.name} is no regular file")
        if opened.st_size > most:
            raise CorruptData(f"{path.name} has {opened.st_size} bytes, over the limit of {most}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most)
    finally:
        os.close(descriptor)
