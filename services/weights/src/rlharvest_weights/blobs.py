"""Blobs: immutable files named by the blake3 of their content.

    <root>/blobs/<first 2 hex>/<64 hex>   complete, verified, durable
    <root>/incoming/<random>.tmp          uploads in progress; what is left of a crash is deleted at start

Invariant: whatever lies under blobs/ has the content its name says. A blob's modification time is its lease: set when
it is uploaded or asked for with HEAD (somebody is about to publish it), set to 1970 when a version names it. A blob
that no version names may be deleted once its lease is older than the grace; a download that has it open keeps its
bytes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from rlharvest.errors import CorruptData, DiskFull, NotFound

from rlharvest_weights import durable


class BlobStore:
    """The blobs of one directory. Blocking; safe to use from several threads.

    Args:
        min_free_bytes: space that uploads must leave on the disk.
        grace_s: how long a blob without a version stays.
    """

    def __init__(self, root: Path, *, min_free_bytes: int, grace_s: float) -> None:
        self._blobs = root / "blobs"
        self._incoming = root / "incoming"
        self._min_free_bytes = min_free_bytes
        self._grace_s = grace_s
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
        """Return the space that uploads may take."""
        return shutil.disk_usage(self._blobs).free - self._min_free_bytes

    def begin(self, digest: str, size: int | None) -> Upload:
        """Start an upload. `size` is what was announced, if it was.

        Raises:
            DiskFull: the disk has no space for it.
        """
        free = self.free_bytes()
        if free < (size or 0) or free <= 0:
            raise DiskFull(
                f"no space left on the weight service's disk: {max(free, 0)} bytes are free for blobs, "
                f"{'more' if size is None else size} are needed. Delete old versions, or give it more."
            )
        return Upload(self, self._incoming / f"{secrets.token_hex(8)}{durable.TEMPORARY_SUFFIX}", digest, size)


class Upload:
    """A blob that is being received; `commit` or `abort` ends it."""

    def __init__(self, store: BlobStore, path: Path, digest: str, size: int | None) -> None:
        self._store = store
        self._path = path
        self._digest = digest
        self._size = size
        self._hasher = blake3()
        self._file = path.open("wb", buffering=0)
        self.received = 0

    def write(self, data: bytes | bytearray) -> None:
        """Take the next bytes; raise DiskFull if there is no space for them."""
        self._hasher.update(data)
        with durable.full_disk(f"blob {self._digest}"), memoryview(data) as view:
            done = 0
            while done < len(view):
                done += self._file.write(view[done:])
        self.received += len(data)

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
        with durable.full_disk(f"blob {self._digest}"):
            os.fsync(self._file.fileno())
            self._file.close()
            if not target.parent.exists():
                target.parent.mkdir(exist_ok=True)
                durable.sync_directory(target.parent.parent)
            new = not target.exists()
            self._path.replace(target)
            durable.sync_directory(target.parent)
        return new

    def abort(self) -> None:
        """Delete what came; nothing after `commit`."""
        self._file.close()
        self._path.unlink(missing_ok=True)
