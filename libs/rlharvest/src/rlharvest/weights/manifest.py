"""The manifest of a version: which files make it up, and how each byte is verified.

Invariants: a version is an ordinary Hugging Face directory; files are named by content (blake3), so equal files of two
versions are one blob; `digest` covers names, sizes and hashes of all files and nothing else, so equal weights have equal
digests whatever their number; a file name has no directory part.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import blake3
import xxhash
from pydantic import BaseModel, ConfigDict, Field, field_validator

from rlharvest.errors import CorruptData

PART_BYTES = 16 << 20
"""Size of the parts that are fetched and verified one by one; the last of a file is shorter."""

Hex64 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}")


class FileEntry(BaseModel):
    """One file of a version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str
    """Name in the directory, e.g. `model.safetensors`."""
    size: int = Field(ge=0)
    blake3: Hex64
    """Of the whole file; also its address in the blob store."""
    parts: tuple[str, ...]
    """xxh3_128 of each part of PART_BYTES, in hexadecimal."""

    @field_validator("name")
    @classmethod
    def _plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError(f"{name!r} is not a plain file name")
        return name


class Manifest(BaseModel):
    """One version."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    version: int = Field(0, ge=0)
    """Number of the publication, given by the weight service, never reused."""
    step: int = Field(ge=0)
    """Optimizer steps done."""
    parent: int | None = None
    """Version it was trained from."""
    tokenizer_digest: str = ""
    files: tuple[FileEntry, ...] = Field(min_length=1)
    created_at: float = 0.0

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


def part_range(entry: FileEntry, index: int) -> tuple[int, int]:
    """Return (start, end) of a part, end excluded."""
    start = index * PART_BYTES
    return start, min(start + PART_BYTES, entry.size)


def part_hash(data: bytes | memoryview) -> str:
    """Return the transport hash of a part."""
    return xxhash.xxh3_128_hexdigest(data)


def describe(path: Path) -> FileEntry:
    """Read a file once and return its entry."""
    hasher = blake3.blake3()
    parts = []
    size = 0
    with path.open("rb") as file:
        while part := file.read(PART_BYTES):
            hasher.update(part)
            parts.append(part_hash(part))
            size += len(part)
    return FileEntry(name=path.name, size=size, blake3=hasher.hexdigest(), parts=tuple(parts))


def verify(path: Path, entry: FileEntry) -> None:
    """Check a whole file against its entry.

    Raises:
        CorruptData: names the file, what was expected and what was found.
    """
    found = describe(path)
    if found.size != entry.size:
        raise CorruptData(f"{entry.name}: {found.size} bytes, the manifest says {entry.size}")
    if found.blake3 != entry.blake3:
        raise CorruptData(f"{entry.name}: blake3 {found.blake3}, the manifest says {entry.blake3}")
