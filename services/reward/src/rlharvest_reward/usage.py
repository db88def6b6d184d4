"""What a sandbox uses in sum: memory of all its processes, and disk, also of files that it has deleted and keeps open.

Limits of the kernel count for one process or one file; the sums are looked at from outside while a call runs. Linux only:
elsewhere everything is 0. A look costs some tenths of a millisecond for one process without files.
"""

from __future__ import annotations

import contextlib
import os
import stat
import sys
from typing import NamedTuple

from rlharvest_reward.fault import Kind

MAX_SCRATCH_BYTES = 1 << 30
"""Of all files of a sandbox."""

MAX_SCRATCH_FILES = 20_000

_BLOCK = 512


class Usage(NamedTuple):
    """One look."""

    processes: int
    memory_bytes: int
    """Each page divided by the processes that share it; 0 for a single process, which the kernel holds to its limit."""
    disk_bytes: int
    files: int


class Excess(NamedTuple):
    """What is too much."""

    kind: Kind
    message: str
    """For people."""


def excess(usage: Usage, memory_mb: int) -> Excess | None:
    """Return what of a usage is too much."""
    if usage.memory_bytes > memory_mb << 20:
        message = f"its {usage.processes} processes used more than {memory_mb} MiB. Raise memory_mb, or use less"
        return Excess("memory", message)
    if usage.disk_bytes > MAX_SCRATCH_BYTES:
        return Excess("crashed", f"it wrote more than {MAX_SCRATCH_BYTES >> 20} MiB into its folder. Write less")
    if usage.files > MAX_SCRATCH_FILES:
        return Excess("crashed", f"it made more than {MAX_SCRATCH_FILES} files in its folder. Make fewer")
    return None


def look(leader: int, scratch: str) -> Usage:
    """Return what the descendants of a process and its folder use; what ends meanwhile counts as nothing."""
    if sys.platform != "linux":
        return Usage(1, 0, 0, 0)
    pids = tree(leader)
    memory = sum(map(_memory, pids)) if len(pids) > 1 else 0
    files, size = _folder(scratch)
    return Usage(len(pids), memory, size + _deleted(pids), files)


def tree(leader: int) -> list[int]:
    """Return the ids of a process and its descendants."""
    found = [leader]
    for pid in found:  # grows
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in os.listdir(f"/proc/{pid}/task"):
                found += [int(each) for each in _read(f"/proc/{pid}/task/{task}/children").split()]
    return found


def group_alive(group: int) -> bool:
    """Return whether a process of a group runs, zombies aside."""
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return False
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        # pid (name) state parent group ...
        fields = _read(f"/proc/{name}/stat").rpartition(b")")[2].split()[:3] if name.isdecimal() else []
        if len(fields) == 3 and int(fields[2]) == group and fields[0] not in (b"Z", b"X"):
            return True
    return False


def _memory(pid: int) -> int:
    for line in _read(f"/proc/{pid}/smaps_rollup").splitlines():
        if line.startswith(b"Pss:"):
            return int(line.split()[1]) << 10
    return 0


def _read(path: str) -> bytes:
    """Return the content of a file of /proc; nothing if its process has ended."""
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def _folder(path: str) -> tuple[int, int]:
    """Return number and bytes of the files beneath a directory; stops counting beyond the limits."""
    files = size = 0
    directories = [path]
    while directories and files <= MAX_SCRATCH_FILES and size <= MAX_SCRATCH_BYTES:
        with contextlib.suppress(OSError), os.scandir(directories.pop()) as entries:
            for entry in entries:
                files += 1
                with contextlib.suppress(OSError):
                    size += entry.stat(follow_symlinks=False).st_blocks * _BLOCK
                    if entry.is_dir(follow_symlinks=False):
                        directories.append(entry.path)
    return files, size


def _deleted(pids: list[int]) -> int:
    """Return the bytes of regular files that processes hold open and that have no name any more."""
    sizes: dict[tuple[int, int], int] = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{descriptor}")
                    if stat.S_ISREG(found.st_mode) and found.st_nlink == 0:
                        sizes[found.st_dev, found.st_ino] = found.st_blocks * _BLOCK
    return sum(sizes.values())
