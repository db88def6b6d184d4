"""The manifest of a version: which files make it up, and how each byte is verified.

Invariants: a version is an ordinary Hugging Face directory; files are named by content (blake3), so equal files of
two versions are one blob; `digest` covers names, sizes and hashes of all files and nothing else, so equal weights have
equal digests whatever their number; a file name has no directory part; names do not repeat; a file has exactly the
parts that its size and part size make.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import blake3
import xxhash
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from rlharvest.errors import CorruptData

PART_BYTES = 16 << 20
"""Size of the parts that are fetched and verified one by one; the last of a file is shorter."""

MANIFEST_BYTES = 16 << 20
"""Most of a manifest as JSON; 64 GiB of shards have one of 0.2 MB."""

MOST_FILES = 4096
"""Of a version."""

Hex32 = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")


class FileEntry(BaseModel):
    """One file of a version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Name in the directory, e.g. `model.safetensors`."""
    size: int = Field(ge=0, le=1 << 50)
    blake3: Hex64
    """Of the whole file; also its address in the blob store."""
    part_bytes: int = Field(default=PART_BYTES, ge=1, le=1 << 30)
    """Size of each part but the last."""
    parts: tuple[Hex32, ...]
    """xxh3_128 of each part, in hexadecimal."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return name

    @model_validator(mode="after")
    def _parts_cover_the_file(self) -> FileEntry:
        wanted = -(-self.size // self.part_bytes)
        if len(self.parts) != wanted:
            raise ValueError(
                f"{self.name}: {len(self.parts)} parts; {self.size} bytes in parts of {self.part_bytes} make {wanted}"
            )
        return self


class Manifest(BaseModel):
    """One version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str = Field(pattern=r"^[A-Za-z0-9_\-]{1,100}$")
    version: int = Field(default=0, ge=0, lt=1 << 32)
    """Number of the publication, given by the weight service, never reused."""
    step: int = Field(ge=0, lt=1 << 32)
    """Optimizer steps done."""
    parent: int | None = Field(default=None, lt=1 << 32)
    """Version it was trained from."""
    tokenizer_digest: str = Field(default="", max_length=200)
    files: tuple[FileEntry, ...] = Field(min_length=1, max_length=MOST_FILES)
    created_at: float = 0.0
    """Seconds since 1970, given by the weight service."""

    @field_validator("files")
    @classmethod
    def _distinct_names(cls, files: tuple[FileEntry, ...]) -> tuple[FileEntry, ...]:
        names = [entry.name for entry in files]
        if len(set(names)) != len(names):
            raise ValueError(f"file names repeat: {sorted(name for name in set(names) if names.count(name) > 1)}")
        return files

    @property
    def digest(self) -> str:
        """blake3 over the files; equal for equal content."""
        hasher = blake3.blake3()
        for entry in sorted(self.files, key=lambda entry: entry.name):
            hasher.update(f"{entry.name}\0{entry.size}\0{entry.blake3}\n".encode())
        return hasher.hexdigest()

    @property
    def bytes(self) -> int:
        """Size of all files together."""
        return sum(entry.size for entry in self.files)

    @property
    def blobs(self) -> tuple[FileEntry, ...]:
        """One entry of each content; files may share one."""
        return tuple({entry.blake3: entry for entry in self.files}.values())


def part_range(entry: FileEntry, index: int) -> tuple[int, int]:
    """Return (start, end) of a part, end excluded."""
    start = index * entry.part_bytes
    return start, min(start + entry.part_bytes, entry.size)


def part_hash(data: bytes | memoryview) -> str:
    """Return the transport hash of a part."""
    return xxhash.xxh3_128_hexdigest(data)


def describe(path: Path, *, part_bytes: int = PART_BYTES) -> FileEntry:
    """Read a file once and return its entry."""
    hasher = blake3.blake3()
    parts = []
    size = 0
    with path.open("rb") as file:
        while part := file.read(part_bytes):
            hasher.update(part)
            parts.append(part_hash(part))
            size += len(part)
    return FileEntry(name=path.name, size=size, blake3=hasher.hexdigest(), part_bytes=part_bytes, parts=tuple(parts))


def verify(path: Path, entry: FileEntry) -> None:
    """Check a whole file against its entry.

    Raises:
        CorruptData: names the file, what was expected and what was found.
    """
    found = describe(path, part_bytes=entry.part_bytes)
    if found.size != entry.size:
        raise CorruptData(f"{entry.name}: {found.size} bytes, the manifest says {entry.size}")
    if found.blake3 != entry.blake3:
        raise CorruptData(f"{entry.name}: blake3 {found.blake3}, the manifest says {entry.blake3}")
