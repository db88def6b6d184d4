"""Writing files so that a crash at any instant leaves the old content or the new, and never half of either."""

from __future__ import annotations

import os
from pathlib import Path

from rlharvest import disk

FIX = "Delete old versions, or give the weight service a larger disk."
"""What to do about its full disk."""

TEMPORARY_SUFFIX = ".tmp"


def write(path: Path, data: bytes) -> None:
    """Replace a file's content: temporary file, fsync, rename, fsync of the directory.

    Raises:
        DiskFull: there is no space; the old content is intact.
    """
    temporary = path.with_name(path.name + TEMPORARY_SUFFIX)
    with disk.naming(path, FIX):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Make renames and deletions in a directory durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
