"""The backup as a file: a tar whose last member says what is in it.

    checkpoints/<job>/step_<n>/…    as the trainer wrote it
    database.sqlite3                every table (rows.py)
    numbers/<job>/state.json        of the weight service
    backup.json                     version, time, size and hash of every member above

Invariants: without its last member, or with a byte changed, it is no backup; a member's name is one of these or the file is
refused, so nothing is ever written outside the directory that it is unpacked to; it is written and read in one pass, so
either may be a pipe.
"""

from __future__ import annotations

import io
import re
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from blake3 import blake3
from pydantic import BaseModel, ConfigDict, ValidationError
from rlharvest.errors import CorruptData, DiskFull

FORMAT = 1
DATABASE = "database.sqlite3"
INDEX = "backup.json"
INDEX_BYTES = 64 << 20

_JOB = r"[A-Za-z0-9_\-]{1,100}"
_FILE = r"[A-Za-z0-9][A-Za-z0-9._\-]{0,199}"
_NAMES = re.compile(
    rf"checkpoints/{_JOB}/step_\d{{1,12}}/(trainer/)?{_FILE}|{re.escape(DATABASE)}|numbers/{_JOB}/state\.json"
)

_CHUNK = 1 << 20


class Member(BaseModel):
    """One file of a backup."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    size: int
    blake3: str


class Index(BaseModel):
    """What a backup says about itself."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: int = FORMAT
    rlharvest: str
    """Version that made it."""
    made_at: float
    """When it was begun, seconds since 1970."""
    members: dict[str, Member]


class Writer:
    """Writes a backup; `finish` completes it."""

    def __init__(self, output: BinaryIO) -> None:
        self._tar = tarfile.open(fileobj=output, mode="w|")  # noqa: SIM115 - `finish` closes it
        self.members: dict[str, Member] = {}

    def add(self, name: str, source: BinaryIO, size: int) -> None:
        """Add `size` bytes of an open file; a file that was deleted meanwhile still has them.

        Raises:
            CorruptData: the file has fewer.
        """
        reader = _Hashing(source)
        header = tarfile.TarInfo(name)
        header.size = size
        try:
            self._tar.addfile(header, reader)
        except OSError as error:
            raise CorruptData(f"{name} became shorter than {size} bytes while it was read ({error})") from error
        self.members[name] = Member(size=size, blake3=reader.digest.hexdigest())

    def finish(self, index: Index) -> None:
        """Write the last member."""
        data = index.model_dump_json(indent=1).encode()
        header = tarfile.TarInfo(INDEX)
        header.size = len(data)
        self._tar.addfile(header, io.BytesIO(data))
        self._tar.close()


class _Hashing(io.RawIOBase):
    """Reads a file and hashes what was read."""

    def __init__(self, source: BinaryIO) -> None:
        self._source = source
        self.digest = blake3()

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1) -> bytes:
        data = self._source.read(size)
        self.digest.update(data)
        return data


def unpack(source: BinaryIO, into: Path) -> Index:
    """Write the members under `into` and return the index, if every byte is what it says.

    Raises:
        CorruptData: it is no backup, or not a whole one; what is under `into` is worth nothing.
        DiskFull: there is no space for it.
    """
    found: dict[str, Member] = {}
    index: Index | None = None
    try:
        for name, size, file in _members(source):
            if index is not None:
                raise CorruptData(f"there is a file behind {INDEX}: {name!r}")
            if name == INDEX:
                index = Index.model_validate_json(file.read(INDEX_BYTES))
            elif _NAMES.fullmatch(name) and ".." not in name and name not in found:
                found[name] = _write(file, into / name, size)
            else:
                raise CorruptData(f"{name!r} is not a file of a backup")
    except (tarfile.TarError, EOFError, ValidationError) as error:
        raise CorruptData(f"this is not a backup of rlharvest, or it is cut off: {error}") from error
    except OSError as error:
        raise DiskFull(f"{into} cannot be written: {error.strerror or error}") from error
    if index is None:
        raise CorruptData(f"the backup is cut off: it has no {INDEX}")
    if index.format != FORMAT:
        raise CorruptData(f"the backup has format {index.format}, this version reads {FORMAT}; use {index.rlharvest}")
    if wrong := sorted(name for name in {*found, *index.members} if found.get(name) != index.members.get(name)):
        raise CorruptData(f"{len(wrong)} files of the backup are not what {INDEX} says, the first is {wrong[0]}")
    return index


def _members(source: BinaryIO) -> Iterator[tuple[str, int, BinaryIO]]:
    with tarfile.open(fileobj=source, mode="r|") as tar:
        for member in tar:
            file = tar.extractfile(member) if member.isreg() else None
            if file is None:
                raise CorruptData(f"{member.name!r} is not a plain file")
            yield member.name, member.size, file  # type: ignore[misc]  # tarfile's reader is one, typed as IO[bytes]


def _write(source: BinaryIO, path: Path, size: int) -> Member:
    path.parent.mkdir(parents=True, exist_ok=True)
    digest = blake3()
    with path.open("xb") as file:
        while data := source.read(_CHUNK):
            digest.update(data)
            file.write(data)
    return Member(size=size, blake3=digest.hexdigest())
