"""Blobs: immutable files named by the blake3 of their content.

    <root>/blobs/<first 2 hex>/<64 hex>   complete, verified, durable
    <root>/incoming/<random>.tmp          uploads in progress; what is left of a crash is deleted at start

Invariants: whatever lies under blobs/ has the content its name says; the space of an upload is set aside when it
begins, so that uploads at the same time cannot together eat the reserve. A blob's modification time is its lease: set when
it is uploaded or asked for with HEAD (somebody is about to publish it), set to 1970 when a version names it. A blob
that no version names may be deleted once its lease is older than the grace; a download that has it open keeps its
bytes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from rlharvest import disk
from rlharvest.errors import CorruptData, DiskFull, LimitReached, NotFound

from rlharvest_weights import durable


class BlobStore:
    """The blobs of one directory. Blocking; safe to use from several threads.

    Args:
        min_free_bytes: space that uploads must leave on the disk.
        grace_s: how long a blob without a version stays.
        most_uploads: uploads at a time.
        free: tells the space on the disk of a path.
    """

    def __init__(
        self,
        root: Path,
        *,
        min_free_bytes: int,
        grace_s: float,
        most_uploads: int = 64,
        free: disk.Free = disk.free_bytes,
    ) -> None:
        self._blobs = root / "blobs"
        self._incoming = root / "incoming"
        self._min_free_bytes = min_free_bytes
        self._grace_s = grace_s
        self._most_uploads = most_uploads
        self._free = free
        self._lock = threading.Lock()
        self._expected: dict[Path, int] = {}
        """Upload -> bytes of it that are still to come, as far as they were announced."""
        shutil.rmtree(self._incoming, ignore_errors=True)
        for directory in (self._blobs, self._incoming):
            directory.mkdir(parents=True, exist_ok=True)

    def path(self, digest: str) -> Path:
        """Return where a blob lies, or would."""
        return self._blobs / digest[:2] / digest

    def open(self, digest: str) -> BinaryIO:
        """Open a blob; raise NotFound if there is none."""
        try:
            return self.path(digest).open("rb")
        except FileNotFoundError as error:
            raise NotFound(f"there is no blob {digest}") from error

    def size(self, digest: str) -> int | None:
        """Return a blob's size in bytes, None if there is none."""
        try:
            return self.path(digest).stat().st_size
        except FileNotFoundError:
            return None

    def renew(self, digest: str) -> bool:
        """Renew a blob's lease; return whether there is one."""
        try:
            os.utime(self.path(digest))
        except FileNotFoundError:
            return False
        return True

    def settle(self, digest: str) -> None:
        """End a blob's lease: a version names it now."""
        os.utime(self.path(digest), (0, 0))

    def leased(self, digest: str) -> bool:
        """Whether somebody may be about to publish a blob."""
        try:
            return time.time() - self.path(digest).stat().st_mtime < self._grace_s
        except FileNotFoundError:
            return False

    def delete(self, digest: str) -> int:
        """Delete a blob; return the bytes that it had."""
        size = self.size(digest) or 0
        self.path(digest).unlink(missing_ok=True)
        return size

    def digests(self) -> Iterator[str]:
        """Yield the name of every blob."""
        for directory in self._blobs.iterdir():
            for path in directory.iterdir():
                yield path.name

    def free_bytes(self) -> int:
        """Return the space that uploads may take, besides what is set aside for those in progress."""
        with self._lock:
            return self._room()

    def require(self, needed: int) -> None:
        """Check that blobs of `needed` bytes could be uploaded now; raise DiskFull if not."""
        with self._lock:
            self._check(needed)

    def begin(self, digest: str, size: int | None) -> Upload:
        """Start an upload. `size` is what was announced, if it was.

        Raises:
            DiskFull: the disk has no space for it.
            LimitReached: too many uploads are in progress.
        """
        path = self._incoming / f"{secrets.token_hex(8)}{durable.TEMPORARY_SUFFIX}"
        with self._lock:
            if len(self._expected) >= self._most_uploads:
                raise LimitReached("uploads at a time", self._most_uploads, "Try again when one has ended.")
            self._check(size if size is not None else 1)
            self._expected[path] = size or 0
        try:
            return Upload(self, path, digest, size)
        except BaseException:
            self.ended(path)
            raise

    def came(self, path: Path, size: int) -> None:
        """Bytes of an upload are on the disk; raise DiskFull when others took the reserve meanwhile."""
        with self._lock:
            self._expected[path] = max(0, self._expected[path] - size)
            self._check(0)

    def ended(self, path: Path) -> None:
        """An upload is over. Idempotent."""
        with self._lock:
            self._expected.pop(path, None)

    def _room(self) -> int:
        return self._free(self._blobs) - self._min_free_bytes - sum(self._expected.values())

    def _check(self, needed: int) -> None:
        room = self._room()
        if room < needed:
            raise DiskFull(
                f"no space left on the weight service's disk: {max(room, 0)} bytes are free for blobs besides the "
                f"{self._min_free_bytes} that must stay free (RLHARVEST_MIN_FREE_BYTES), {max(needed, 1)} are needed. "
                f"{durable.FIX}"
            )


class Upload:
    """A blob that is being received; `commit` or `abort` ends it."""

    def __init__(self, store: BlobStore, path: Path, digest: str, size: int | None) -> None:
        self._store = store
        self._path = path
        self._digest = digest
        self._size = size
        self._hasher = blake3()
        with disk.naming(f"blob {digest}", durable.FIX):
            self._file = path.open("wb", buffering=0)
        self.received = 0

    def write(self, data: bytes | bytearray) -> None:
        """Take the next bytes; raise DiskFull if there is no space for them."""
        self._hasher.update(data)
        with disk.naming(f"blob {self._digest}", durable.FIX), memoryview(data) as view:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        self.received += len(data)
        self._store.came(self._path, len(data))

    def commit(self) -> bool:
        """Verify, make durable, put in place; return whether the blob is new.

        Raises:
            CorruptData: the bytes are not the ones that were announced.
            DiskFull: there is no space.
        """
        if self._size is not None and self.received != self._size:
            raise CorruptData(f"blob {self._digest}: {self.received} bytes came, {self._size} were announced")
        found = self._hasher.hexdigest()
        if found != self._digest:
            raise CorruptData(f"blob {self._digest}: the bytes that came have the blake3 {found}")
        target = self._store.path(self._digest)
        with disk.naming(f"blob {self._digest}", durable.FIX):
            os.fsync(self._file.fileno())
            self._file.close()
            if not target.parent.exists():
                target.parent.mkdir(exist_ok=True)
                durable.sync_directory(target.parent.parent)
            new = not target.exists()
            self._path.replace(target)
            durable.sync_directory(target.parent)
        self._store.ended(self._path)
        return new

    def abort(self) -> None:
        """End it: delete what came, nothing after `commit`. Idempotent; called in any case."""
        self._file.close()
        self._path.unlink(missing_ok=True)
        self._store.ended(self._path)
