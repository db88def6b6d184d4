"""Checkpoints of running trainers, read so that they can neither change nor vanish meanwhile."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO

import structlog
from blake3 import blake3
from pydantic import BaseModel, ValidationError
from rlharvest.errors import CorruptData
from rlharvest.weights.manifest import FileEntry

log = structlog.get_logger(__name__)

STATE = "state.json"
"""Written last by the trainer; names the size and hash of every other file."""

_CHUNK = 1 << 20
_STEP = re.compile(r"step_(\d{1,12})")


class _Files(BaseModel):
    """What matters here of a checkpoint's state; the rest is the trainer's."""

    files: dict[str, FileEntry]


class Checkpoint:
    """The open files of one checkpoint. The trainer may delete it; what is open stays."""

    def __init__(self, job: str, step: int, files: dict[str, tuple[BinaryIO, int]]) -> None:
        self.job = job
        self.step = step
        self.files = files
        """Name -> (file, at its beginning, and size)."""


def newest(root: Path, job: str, stack: ExitStack) -> Checkpoint | None:
    """Open the newest checkpoint of a job whose every file verifies; None if there is none.

    Args:
        stack: closes the files.
    """
    before: set[int] = set()
    while (found := steps(root / job)) != before:
        for step in sorted(found, reverse=True):
            try:
                return _open(root / job / f"step_{step}", job, step, stack)
            except FileNotFoundError:
                pass  # deleted meanwhile, so there is a newer one; or the rest of a deletion that was cut short
            except CorruptData as error:
                log.warning("checkpoint.ignored", job=job, step=step, why=str(error))
        before = found
    return None


def jobs(root: Path) -> Iterator[str]:
    """Yield the jobs that have a directory of checkpoints."""
    if root.is_dir():
        yield from sorted(path.name for path in root.iterdir() if path.is_dir() and not path.name.startswith("."))


def steps(directory: Path) -> set[int]:
    """Return the steps of the checkpoints in a job's directory, complete or not."""
    if not directory.is_dir():
        return set()
    return {int(match[1]) for path in directory.iterdir() if (match := _STEP.fullmatch(path.name))}


def _open(path: Path, job: str, step: int, stack: ExitStack) -> Checkpoint:
    state = stack.enter_context((path / STATE).open("rb"))
    try:
        entries = _Files.model_validate_json(state.read()).files
    except ValidationError as error:
        raise CorruptData(f"{path / STATE}: {error}") from error
    files: dict[str, BinaryIO] = {STATE: state}
    for name in entries:
        files[name] = stack.enter_context((path / name).open("rb"))
    # All are open before the first is read: from here on the trainer may delete the checkpoint.
    for name, entry in entries.items():
        digest = blake3()
        while data := files[name].read(_CHUNK):
            digest.update(data)
        if digest.hexdigest() != entry.blake3:
            raise CorruptData(f"{path / name} is not what {STATE} says")
    for file in files.values():
        file.seek(0)
    return Checkpoint(job, step, {name: (file, os.fstat(file.fileno()).st_size) for name, file in files.items()})
