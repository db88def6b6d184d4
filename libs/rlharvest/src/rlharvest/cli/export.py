"""A trained model as a directory that `AutoModelForCausalLM.from_pretrained` loads.

From a checkpoint on this machine where there is one, else from the weight service. Invariants: every file is verified
against the hash it was written with; the directory appears whole, by one rename, or not at all.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rlharvest.errors import Conflict, CorruptData, InvalidField, NotFound
from rlharvest.weights import catalog, puller
from rlharvest.weights.manifest import FileEntry, verify

STATE = "state.json"
"""Of a checkpoint: names the size and hash of every file; written last."""


def choose(checkpoints: Sequence[Mapping[str, Any]], step: int | None) -> Mapping[str, Any]:
    """Return the newest checkpoint, or the one of `step`; `checkpoints` come newest first.

    Raises:
        NotFound: there is none; names those there are.
    """
    for checkpoint in checkpoints:
        if step is None or checkpoint["step"] == step:
            return checkpoint
    if step is None:
        raise NotFound("the job has no checkpoint yet")
    known = ", ".join(str(checkpoint["step"]) for checkpoint in checkpoints) or "none"
    raise NotFound(f"the job has no checkpoint of step {step}; there are: {known}")


def check_target(target: Path) -> None:
    """Raise InvalidField if a directory cannot be made there."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise InvalidField("DIR", str(target), "exists and is not empty", "Name a directory that does not exist yet.")
    if not target.absolute().parent.is_dir():
        raise InvalidField("DIR", str(target), "its parent directory does not exist", f"Run: mkdir -p {target.parent}")


def from_checkpoint(source: Path, target: Path) -> list[FileEntry]:
    """Copy the model of a checkpoint; return its files. The optimiser's state stays.

    Raises:
        CorruptData: a file does not verify.
    """
    try:
        files = json.loads((source / STATE).read_text(encoding="utf-8"))["files"]
        entries = [FileEntry.model_validate(entry) for name, entry in files.items() if "/" not in name]
    except (OSError, ValueError, KeyError, ValidationError) as error:
        raise CorruptData(f"{source / STATE} cannot be read: {error}") from error
    return _publish(entries, target, lambda entry: source / entry.name)


def from_weights(url: str, job: str, version: int, target: Path) -> list[FileEntry]:
    """Pull a version from the weight service; return its files.

    Raises:
        NotFound: the service does not keep the version any more.
        CorruptData: what it sends does not verify.
        Unavailable: it does not answer.
    """
    cache = target.with_name(f".{target.name}.pulled")

    async def pull() -> tuple[Path, list[FileEntry]]:
        manifest = await catalog.fetch_manifest(url, job, version)
        return await puller.pull(url, manifest, cache), list(manifest.files)

    directory, entries = asyncio.run(pull())
    try:
        return _publish(entries, target, lambda entry: directory / entry.name)
    finally:
        shutil.rmtree(cache, ignore_errors=True)


def _publish(entries: Sequence[FileEntry], target: Path, source: Callable[[FileEntry], Path]) -> list[FileEntry]:
    target = target.absolute()
    draft = target.with_name(f".{target.name}.writing-{os.getpid()}")
    draft.mkdir()
    try:
        for entry in entries:
            shutil.copyfile(source(entry), draft / entry.name)
            verify(draft / entry.name, entry)
            with (draft / entry.name).open("rb") as file:
                os.fsync(file.fileno())
        try:
            draft.rename(target)
        except OSError as error:
            raise Conflict(f"{target} came into being meanwhile; name another directory") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return list(entries)
