"""From `dataset.path` to rows: which reader reads what, in which order, and what the rows depend on.

`Source` is opened once: its fingerprint covers the content of every file, so equal fingerprints give equal rows.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import blake3
from rlharvest.confinement import inside
from rlharvest.jobs.model import Dataset

from rlharvest_coordinator.data import generators, hub, jsonlines, parquet
from rlharvest_coordinator.data.paths import confine
from rlharvest_coordinator.data.rows import FIELD, Limits, Rows, refuse

_SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".parquet")
_KNOWN = "a .jsonl, .jsonl.gz, .json or .parquet file, a directory of them, reasoning-gym:<task> or hf://<name>"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a job's rows come from."""

    dataset: Dataset
    seed: int
    files: tuple[Path, ...]
    """Empty for a generator."""

    def fingerprint(self) -> str:
        """Return 64 hexadecimal digits that cover all that the rows depend on."""
        hasher = blake3.blake3()
        if not self.files:
            hasher.update(
                generators.fingerprint(self._task, self.dataset.params, seed=self.seed, size=self._size).encode()
            )
        for file in self.files:
            hasher.update(f"{file.suffix}\0{blake3.blake3().update_mmap(file).hexdigest()}\n".encode())
        return hasher.hexdigest()

    def rows(self, limits: Limits) -> Rows:
        """Yield the rows in order, at most `dataset.size` of them.

        Raises:
            InvalidField: a row cannot be read, or there are more than `limits.rows`.
        """
        if not self.files:
            yield from generators.read(self._task, self.dataset.params, seed=self.seed, size=self._size)
            return
        for number, row in enumerate(self._all(limits)):
            if number == self.dataset.size:
                return
            if number == limits.rows:
                raise refuse(self.dataset.path, "", f"has more than {limits.rows} rows", "Set dataset.size.")
            yield row

    def _all(self, limits: Limits) -> Rows:
        for file in self.files:
            yield from parquet.read(file) if file.suffix == ".parquet" else jsonlines.read(file, limits)

    @property
    def _task(self) -> str:
        return self.dataset.path.removeprefix(generators.PREFIX)

    @property
    def _size(self) -> int:
        return self.dataset.size or generators.DEFAULT_SIZE


def open_source(dataset: Dataset, *, seed: int, roots: Sequence[Path]) -> Source:
    """Find what `dataset.path` names.

    Raises:
        InvalidField: it names nothing that can be read, or lies outside of `roots`.
    """
    if dataset.path.startswith(generators.PREFIX):
        return Source(dataset, seed, ())
    if dataset.path.startswith(hub.PREFIX):
        name = dataset.path.removeprefix(hub.PREFIX)
        return Source(dataset, seed, tuple(hub.dataset_files(name, configuration=dataset.name, split=dataset.split)))
    path = confine(FIELD, dataset.path, roots)
    files = tuple(_shards(dataset.path, path, roots)) if path.is_dir() else (path,)
    for file in files:
        if not file.name.endswith(_SUFFIXES) or not file.is_file():
            raise refuse(dataset.path, file.name, "is of no kind that is read", f"Use {_KNOWN}.")
        if not os.access(file, os.R_OK):
            raise refuse(dataset.path, file.name, "may not be read by the coordinator", "Change its permissions.")
    return Source(dataset, seed, files)


def _shards(given: str, directory: Path, roots: Sequence[Path]) -> Iterator[Path]:
    """Yield the data files of a directory by name; .json only where there is nothing else (it is often metadata)."""
    files = sorted(file for file in directory.iterdir() if file.is_file() and not file.name.startswith("."))
    tables = [file for file in files if file.name.endswith(".parquet")]
    lines = [file for file in files if file.name.endswith((".jsonl", ".jsonl.gz"))]
    if tables and lines:
        raise refuse(
            given,
            "",
            f"holds both Parquet ({tables[0].name}) and JSON lines ({lines[0].name})",
            "Name one file, or a directory with one kind.",
        )
    chosen = tables or lines or [file for file in files if file.name.endswith(".json")]
    if not chosen:
        found = ", ".join(file.name for file in files[:8]) or "nothing"
        raise refuse(given, "", f"holds no data file; found {found}", f"Use {_KNOWN}.")
    for file in chosen:
        if not inside(file, roots):
            raise refuse(given, file.name, "is a link that leads outside of the server's roots", "Copy the file.")
        yield file
