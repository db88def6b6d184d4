"""A tokenised dataset on disk: immutable, memory-mapped, named by the digest of all that it depends on.

A directory holds three columns of variable length, each as one file of bytes and one of offsets (little-endian u64,
one more than rows): `ids` (little-endian u32), `texts` (the prompts as the model sees them), `rows` (JSON: the prompt
as the dataset has it and the columns that rewards get), and `report.json`. It is written under another name, synced
and renamed, so a directory that is there is whole.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt
from rlharvest import disk
from rlharvest.errors import CorruptData, NotFound

Ids = npt.NDArray[np.uint32]

_COLUMNS = ("ids", "texts", "rows")
_STALE_S = 24 * 3600.0


class TokenisedDataset:
    """Random access by row; any number of readers, in any thread."""

    def __init__(self, directory: Path) -> None:
        """Open what `Writer` wrote.

        Raises:
            NotFound: there is no such directory.
            CorruptData: its files do not fit together.
        """
        if not directory.is_dir():
            raise NotFound(f"there is no tokenised dataset in {directory}")
        self.directory = directory
        self.report: dict[str, Any] = json.loads((directory / "report.json").read_text(encoding="utf-8"))
        self._offsets: dict[str, npt.NDArray[np.uint64]] = {}
        self._bytes: dict[str, npt.NDArray[np.uint8]] = {}
        for column in _COLUMNS:
            self._offsets[column] = np.asarray(np.memmap(directory / f"{column}.offsets", dtype="<u8", mode="r"))
            self._bytes[column] = np.asarray(np.memmap(directory / f"{column}.bytes", dtype=np.uint8, mode="r"))
            rows, size = len(self._offsets[column]) - 1, int(self._offsets[column][-1])
            if rows != self.report["kept"] or size != len(self._bytes[column]):
                raise CorruptData(
                    f"{directory}/{column}: {rows} rows and {size} bytes do not fit report.json; delete it"
                )

    def __len__(self) -> int:
        return len(self._offsets["ids"]) - 1

    def prompt_ids(self, row: int) -> Ids:
        """Return the token ids of a prompt, shape (tokens,), read-only."""
        return self._slice("ids", row).view("<u4")

    def prompt_text(self, row: int) -> str:
        """Return the prompt as the model sees it."""
        return self._slice("texts", row).tobytes().decode()

    def prompt_json(self, row: int) -> str:
        """Return the prompt as the dataset has it, as JSON: a string or a list of messages."""
        return json.dumps(self._row(row)["prompt"], ensure_ascii=False)

    def columns(self, row: int) -> dict[str, Any]:
        """Return what rewards get of this row, `ground_truth` among it if the row has one."""
        columns: dict[str, Any] = self._row(row)["columns"]
        return columns

    def _row(self, row: int) -> dict[str, Any]:
        value: dict[str, Any] = json.loads(self._slice("rows", row).tobytes())
        return value

    def _slice(self, column: str, row: int) -> npt.NDArray[np.uint8]:
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a dataset with {len(self)}")
        offsets = self._offsets[column]
        return self._bytes[column][int(offsets[row]) : int(offsets[row + 1])]


class Writer:
    """Writes one dataset; a context that leaves either a whole directory or nothing.

    Example::

        with Writer(parent, digest) as writer:
            writer.add(ids, text, prompt, columns)
            writer.finish(report)
    """

    def __init__(self, parent: Path, digest: str) -> None:
        self._final = parent / digest
        self._partial = parent / f".{digest}.{secrets.token_hex(4)}"
        self._files = ExitStack()
        self._columns: dict[str, BinaryIO] = {}
        self._offsets: dict[str, list[int]] = {column: [0] for column in _COLUMNS}

    def __enter__(self) -> Writer:
        with self._naming():
            self._partial.parent.mkdir(parents=True, exist_ok=True)
            _sweep(self._partial.parent)
            self._partial.mkdir()
            for column in _COLUMNS:
                file = (self._partial / f"{column}.bytes").open("wb")
                self._columns[column] = self._files.enter_context(file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            # Closing writes what is buffered, and would hide why it could not be written before.
            with self._naming():
                self._files.close()
        finally:
            shutil.rmtree(self._partial, ignore_errors=True)

    def add(self, ids: Sequence[int], text: str, prompt: Any, columns: dict[str, Any]) -> None:
        """Append a row."""
        row = json.dumps({"prompt": prompt, "columns": columns}, ensure_ascii=False, separators=(",", ":"))
        values = {"ids": np.asarray(ids, dtype="<u4").tobytes(), "texts": text.encode(), "rows": row.encode()}
        with self._naming():
            for column, data in values.items():
                self._columns[column].write(data)
                self._offsets[column].append(self._offsets[column][-1] + len(data))

    def finish(self, report: dict[str, Any]) -> Path:
        """Sync everything and give the directory its name; where another writer was faster, its directory stays."""
        with self._naming():
            for column, file in self._columns.items():
                file.flush()
                os.fsync(file.fileno())
                offsets = np.asarray(self._offsets[column], dtype="<u8").tobytes()
                _write(self._partial / f"{column}.offsets", offsets)
            _write(self._partial / "report.json", json.dumps(report, indent=1).encode())
            try:
                self._partial.rename(self._final)
            except OSError as error:
                if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
                    raise
            _sync_directory(self._final.parent)
        return self._final

    def _naming(self) -> AbstractContextManager[None]:
        return disk.naming(self._final, "Free some, or move RLHARVEST_DATA_DIR.")


def _write(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sweep(parent: Path) -> None:
    """Remove what a killed writer left: nobody writes for a day."""
    for partial in parent.glob(".*.*"):
        if partial.stat().st_mtime < time.time() - _STALE_S:
            shutil.rmtree(partial, ignore_errors=True)
