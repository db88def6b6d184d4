"""Durable states of training: a directory each, complete or invisible.

    <root>/step_<n>/  config.json, *.safetensors, tokenizer files     an ordinary Hugging Face directory
                      trainer/optimizer.safetensors                   moments, master weights, random state
                      state.json                                      written last; size and hash of every file

    <root>/.writing_<n>_<fence>/  one that is being written, by the claim of that fence
    <root>/.fence                 the highest fence that ever saved or resumed here

Invariants: a directory named step_<n> appears by one rename, after everything in it was synced to the disk; what a
crash or a full disk leaves behind has another name and is deleted at the next save of the same or a higher claim, never
by an older one; a claim that a higher one followed changes nothing any more, whenever it wakes; nothing is begun for
which there is no room; a checkpoint is used only when every file verifies; the newest `keep` complete ones stay.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import structlog
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rlharvest import disk
from rlharvest.errors import Conflict, CorruptData, Fenced
from rlharvest.weights.manifest import FileEntry, describe, verify
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rlharvest_trainer import versions
from rlharvest_trainer.model import CausalLM

log = structlog.get_logger(__name__)

OPTIMIZER = "trainer/optimizer.safetensors"
STATE = "state.json"
_NAME = re.compile(r"step_(\d+)")
_DRAFT = re.compile(r"\.writing_\d+_(\d+)")
_FENCE = ".fence"
_FENCE_DIGITS = 20
_SMALL_FILES_BYTES = 16 << 20
"""For config, tokenizer, headers and state.json."""


class State(BaseModel):
    """Everything of a checkpoint that is not a tensor."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    job: str
    job_digest: str
    """Of the job's spec when this was saved."""
    fence: int
    step: int = Field(ge=0)
    """Optimizer steps done: the next batch's number, and the learning rate schedule's place."""
    version: int | None = Field(ge=0)
    """That the weight service gave to these weights; None: not published when this was saved."""
    parent: int | None
    """Version they were trained from."""
    digest: str = ""
    """Of the version that these files make."""
    seed: int
    tokens: int = Field(ge=0)
    """Prompt and response tokens trained so far."""
    skipped: int = Field(ge=0)
    """Steps that changed nothing because of values that were not finite."""
    metrics: dict[str, float]
    """Of the last step."""
    files: dict[str, FileEntry] = Field(default_factory=dict)
    """Every file but state.json, by path."""


class Checkpoints:
    """The checkpoints of one job in one directory.

    Args:
        keep: complete ones that stay.
        reserve: bytes that must stay free on the disk.
        free: tells the space on the disk of a path.
    """

    def __init__(self, root: Path, *, keep: int, reserve: int = 0, free: disk.Free = disk.free_bytes) -> None:
        self.root = root.absolute()
        self.keep = keep
        self._reserve = reserve
        self._free = free

    def path(self, step: int) -> Path:
        """Return where the checkpoint of a step lies."""
        return self.root / f"step_{step}"

    def save(
        self, state: State, model: CausalLM, tensors: Mapping[str, Tensor], *, tokenizer: Path, shard_bytes: int
    ) -> tuple[Path, State]:
        """Write a checkpoint, make it durable, delete what is no longer kept; return its path and its whole state.

        Args:
            state: its `digest` and `files` are filled in here.
            tensors: the optimiser's and the random state.

        Raises:
            DiskFull: names the path; earlier checkpoints are as they were.
            Fenced: a newer claim saved or resumed here; nothing was changed.
        """
        final = self.path(state.step)
        draft = self.root / f".writing_{state.step}_{state.fence}"
        with disk.naming(draft, also=(SafetensorError,)):
            with self._alone(state.fence):
                self._sweep(state.fence)
            needed = versions.model_bytes(model) + sum(each.numel() * each.element_size() for each in tensors.values())
            disk.require(draft, needed + _SMALL_FILES_BYTES, reserve=self._reserve, free=self._free)
            try:
                entries = versions.write(model, draft, tokenizer=tokenizer, shard_bytes=shard_bytes)
                (draft / OPTIMIZER).parent.mkdir()
                save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft / OPTIMIZER)
                files = {entry.name: entry for entry in entries} | {OPTIMIZER: describe(draft / OPTIMIZER)}
                digest = versions.digest(state.job, state.step, entries)
                state = state.model_copy(update={"digest": digest, "files": files})
                for name in files:
                    _sync(draft / name)
                _write_durably(draft / STATE, state.model_dump_json(indent=1))
                _sync(draft / "trainer")
                _sync(draft)
                with self._alone(state.fence):
                    if final.exists():
                        _delete(final)  # not verifiable, or the newest one would have been resumed from
                    draft.rename(final)
                    _sync(self.root)
                    self._prune(state.step)
            except BaseException:
                shutil.rmtree(draft, ignore_errors=True)
                raise
        return final, state

    def claim(self, fence: int) -> None:
        """Shut out every claim before this one.

        Raises:
            Fenced: a newer claim was here already.
        """
        with disk.naming(self.root), self._alone(fence):
            pass

    def newest(self, job: str) -> tuple[Path, State] | None:
        """Return the newest checkpoint that is complete and verifies, or None.

        Raises:
            Conflict: the directory holds checkpoints of another job.
        """
        for step in sorted(self._steps(), reverse=True):
            path = self.path(step)
            try:
                state = read(path)
            except CorruptData as error:
                log.warning("checkpoint.ignored", path=str(path), why=str(error))
                continue
            if state.job != job:
                raise Conflict(f"{self.root} holds checkpoints of {state.job}, not of {job}. Give each job its own.")
            return path, state
        return None

    def _steps(self) -> list[int]:
        if not self.root.is_dir():
            return []
        return [int(match[1]) for path in self.root.iterdir() if (match := _NAME.fullmatch(path.name))]

    def _prune(self, newest: int) -> None:
        # Steps above the one just saved did not verify when it was resumed from.
        older = sorted((step for step in self._steps() if step <= newest), reverse=True)
        for step in older[self.keep :]:
            _delete(self.path(step))

    def _sweep(self, fence: int) -> None:
        """Delete what crashes of this claim and of those before it left."""
        for path in self.root.glob(".writing_*"):
            draft = _DRAFT.fullmatch(path.name)
            if draft is not None and int(draft[1]) <= fence:
                shutil.rmtree(path, ignore_errors=True)

    @contextmanager
    def _alone(self, fence: int) -> Iterator[None]:
        """Hold the directory against other trainers; raise Fenced if a newer claim was here."""
        self.root.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.root / _FENCE, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            text = os.pread(descriptor, _FENCE_DIGITS, 0).decode("ascii", "replace")
            known = int(text) if text.isdecimal() else 0
            if known > fence:
                raise Fenced(f"{self.root}: claim {known} was here, claim {fence} is over")
            if known < fence:
                # Always as many digits: what is there is overwritten in place, which needs no space.
                os.pwrite(descriptor, f"{fence:0{_FENCE_DIGITS}d}".encode(), 0)
                os.fsync(descriptor)
            yield
        finally:
            os.close(descriptor)


def read(path: Path) -> State:
    """Return the state of a checkpoint whose every file verifies.

    Raises:
        CorruptData: it is incomplete, or a file is not what state.json says; names the file.
    """
    try:
        state = State.model_validate_json((path / STATE).read_bytes())
    except (OSError, ValidationError) as error:
        raise CorruptData(f"{path}: {STATE} is missing or unreadable") from error
    for name, entry in state.files.items():
        try:
            verify(path / name, entry)
        except OSError as error:
            raise CorruptData(f"{path}: {name} cannot be read: {error}") from error
    return state


def tensors(path: Path) -> dict[str, Tensor]:
    """Return the optimiser's and the random state of a checkpoint; raise CorruptData if they cannot be read."""
    try:
        return load_file(path / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise CorruptData(f"{path / OPTIMIZER}: {error}") from error


def _delete(path: Path) -> None:
    # Without state.json it is no checkpoint any more, even if the rest of the deletion is cut short.
    (path / STATE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _write_durably(path: Path, text: str) -> None:
    draft = path.with_name(f".{path.name}")
    draft.write_text(text, encoding="utf-8")
    _sync(draft)
    draft.rename(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
