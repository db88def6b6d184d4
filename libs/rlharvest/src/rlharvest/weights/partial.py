"""A file that is being downloaded in parts, and the sidecar that lets a later process go on where this one died.

Invariants: the sidecar `<file>.parts` has one byte a part, 1 once the part's hash was right; it is a hint, so that a
part which it names is hashed again before it is trusted (the machine, not only the process, may have died); the file
has its full size from the start, its blocks reserved, since writing through a map into a full disk would kill the
process.
"""

from __future__ import annotations

import mmap
import os
import threading
from pathlib import Path

from rlharvest import disk
from rlharvest.weights.manifest import FileEntry, part_hash, part_range


class PartialFile:
    """An open partial file; `missing` are the parts still to fetch. Threads may write different parts at once."""

    def __init__(self, path: Path, entry: FileEntry) -> None:
        self.path = path
        self.entry = entry
        self._sidecar = path.with_name(path.name + ".parts")
        self._lock = threading.Lock()
        self._data = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        self._marks = os.open(self._sidecar, os.O_RDWR | os.O_CREAT, 0o644)
        self._map: mmap.mmap | None = None
        try:
            self._reserve()
            self.missing = self._unverified()
        except BaseException:
            self.close()
            raise

    def _reserve(self) -> None:
        size = self.entry.size
        if os.fstat(self._data).st_size != size or os.fstat(self._marks).st_size != len(self.entry.parts):
            os.ftruncate(self._marks, 0)
            os.ftruncate(self._data, 0)
            os.ftruncate(self._marks, len(self.entry.parts))
            if size:
                try:
                    with disk.naming(f"{self.entry.name} ({size} bytes) in {self.path.parent}"):
                        os.posix_fallocate(self._data, 0, size)
                except BaseException:
                    self.close()
                    self.discard()
                    raise
        if size:
            self._map = mmap.mmap(self._data, size)

    def _unverified(self) -> list[int]:
        marks = os.pread(self._marks, len(self.entry.parts), 0)
        return [index for index, mark in enumerate(marks) if mark != 1 or not self.verified(index)]

    def window(self, index: int) -> memoryview:
        """Return the writable bytes of a part; release it before `close`."""
        start, end = part_range(self.entry, index)
        assert self._map is not None
        return memoryview(self._map)[start:end]

    def verified(self, index: int) -> bool:
        """Whether the bytes of a part have the hash that the manifest names."""
        with self.window(index) as window:
            return part_hash(window) == self.entry.parts[index]

    def mark(self, index: int) -> None:
        """Remember that a part is verified."""
        os.pwrite(self._marks, b"\x01", index)
        with self._lock:
            if index in self.missing:
                self.missing.remove(index)

    def reset(self) -> None:
        """Forget every part: all are missing."""
        with self._lock:
            self.missing = list(range(len(self.entry.parts)))
        os.pwrite(self._marks, bytes(len(self.entry.parts)), 0)

    def close(self) -> None:
        """Close the file; what is there stays for a later try."""
        if self._map is not None:
            self._map.close()
            self._map = None
        for descriptor in (self._data, self._marks):
            if descriptor >= 0:
                os.close(descriptor)
        self._data = self._marks = -1

    def discard(self) -> None:
        """Delete the sidecar, and the file unless it was moved away."""
        self._sidecar.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
