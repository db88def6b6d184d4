"""Bring a version from the weight service into a directory of this machine: in parts, resumed, verified, atomic.

    <root>/<job>/<version>/                  a complete version: the files and `.manifest.json`
    <root>/<job>/.incoming/<blake3>[.parts]  files that are being downloaded, and which of their parts verified
    <root>/<job>/.lock                       held by the one process that pulls

Invariants: a version's directory appears by rename, after every file verified whole; a directory that is there
already is verified again before it is used, since a machine may have died since; a file that another version has is
linked, not fetched; files are read-only, because a link is shared between versions.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import structlog
from pydantic import ValidationError

from rlharvest.credentials import Caller
from rlharvest.errors import CorruptData
from rlharvest.weights import safetensors_check
from rlharvest.weights.download import Download
from rlharvest.weights.manifest import FileEntry, Manifest, verify
from rlharvest.weights.partial import PartialFile
from rlharvest.weights.transfer import Cancelled, Progress, Transfer, in_thread

log = structlog.get_logger(__name__)

MANIFEST_NAME = ".manifest.json"
"""The manifest inside a version's directory; no file of a version can have this name."""


@dataclass(frozen=True)
class PullOptions:
    """How a pull behaves.

    Attributes:
        threads: parts that are fetched at once.
        timeout_s: a connection that stands still for this long has failed.
        total_s: time limit of the whole pull.
        strikes: wrong replies in a row that are tolerated.
        keep: complete versions that stay in the directory, the newest ones and the one pulled.
        caller: how this process shows itself to the service.
    """

    threads: int = 6
    timeout_s: float = 30.0
    total_s: float = 1800.0
    strikes: int = 4
    keep: int = 2
    caller: Caller = field(default_factory=Caller)


async def pull(
    base_url: str,
    manifest: Manifest,
    root: Path,
    *,
    options: PullOptions | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Return the directory that holds the version, every byte verified. Cancelling stops it; a later pull goes on.

    Args:
        base_url: of the weight service, e.g. http://127.0.0.1:7083.
        root: where versions are kept; <root>/<job>/<version> is returned.
        progress: called on the event loop with (bytes verified, bytes in all); equal files count once.

    Raises:
        Unavailable: the service did not serve within the time limit.
        CorruptData: the service keeps sending bytes that do not verify; nothing of them is used.
        NotFound: the service does not have a file any more.
        DiskFull: there is no space for a file.
    """
    options = options or PullOptions()
    transfer = Transfer(base_url, timeout_s=options.timeout_s, total_s=options.total_s, caller=options.caller)
    counter = Progress(sum(entry.size for entry in manifest.blobs), progress)
    return await in_thread(_Pull(manifest, root, options, transfer, counter).run, transfer)


class _Pull:
    """One pull; blocking, in a thread of its own with a pool for the parts."""

    def __init__(
        self, manifest: Manifest, root: Path, options: PullOptions, transfer: Transfer, progress: Progress
    ) -> None:
        self._manifest = manifest
        self._home = root / manifest.job
        self._target = self._home / str(manifest.version)
        self._incoming = self._home / ".incoming"
        self._options = options
        self._transfer = transfer
        self._progress = progress

    def run(self) -> Path:
        self._incoming.mkdir(parents=True, exist_ok=True)
        with self._alone():
            for leftover in (*self._home.glob(".staging-*"), *self._home.glob(".damaged-*")):
                shutil.rmtree(leftover)
            if self._target.exists():
                problem = damage(self._target, self._manifest)
                if problem is None:
                    self._progress.add(self._progress.total)
                    self._prune()
                    return self._target
                log.warning("weights.damaged", directory=str(self._target), problem=problem)
                self._target.rename(self._home / f".damaged-{self._manifest.version}")
            sources = self._from_other_versions()
            self._fetch([entry for entry in self._manifest.blobs if entry.blake3 not in sources])
            self._assemble(sources)
            self._prune()
        return self._target

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Hold the lock of the job's directory; a process that dies lets go of it."""
        with (self._home / ".lock").open("wb") as lock:
            tries = 0
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    self._transfer.pause(min(tries, 1), f"another process pulls into {self._home}")
                    tries += 1
            yield

    def _from_other_versions(self) -> dict[str, Path]:
        """Return {blake3: path} of files of this version that other versions have, verified."""
        wanted = {entry.blake3: entry for entry in self._manifest.files}
        found: dict[str, Path] = {}
        for directory in sorted(self._home.iterdir()):
            for entry in _recorded(directory):
                path = directory / entry.name
                if entry.blake3 not in wanted or entry.blake3 in found:
                    continue
                self._transfer.check()
                try:
                    verify(path, entry)
                except (CorruptData, OSError) as error:
                    log.warning("weights.damaged", file=str(path), problem=str(error))
                    continue
                found[entry.blake3] = path
                self._progress.add(entry.size)
        return found

    def _fetch(self, entries: list[FileEntry]) -> None:
        with ExitStack() as stack:
            pool = stack.enter_context(ThreadPoolExecutor(self._options.threads, "weights"))
            downloads = []
            for entry in entries:
                partial = PartialFile(self._incoming / entry.blake3, entry)
                stack.push(lambda *_, partial=partial: partial.close())
                there = set(range(len(entry.parts))) - set(partial.missing)
                self._progress.add(sum(_part_size(entry, index) for index in there))
                downloads.append(Download(partial, self._transfer, self._progress, strikes=self._options.strikes))
            stack.push(lambda *_: pool.shutdown(wait=True, cancel_futures=True))
            parts = [(download, index) for download in downloads for index in download.partial.missing]
            self._all(pool, [pool.submit(download.part, index) for download, index in parts])
            self._all(pool, [pool.submit(download.rest) for download in downloads])

    def _all(self, pool: ThreadPoolExecutor, futures: list[Future[None]]) -> None:
        """Wait for all; when one fails, end the others and raise its error."""
        done, running = wait(futures, return_when=FIRST_EXCEPTION)
        if running:
            self._transfer.cancel()
            pool.shutdown(wait=True, cancel_futures=True)
        errors = [error for future in done if (error := future.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, Cancelled)):
            raise error

    def _assemble(self, sources: dict[str, Path]) -> None:
        staging = self._home / f".staging-{self._manifest.version}"
        staging.mkdir()
        for entry in self._manifest.files:
            path = staging / entry.name
            _link(sources.get(entry.blake3, self._incoming / entry.blake3), path)
            path.chmod(0o444)
            if entry.name.endswith(".safetensors"):
                safetensors_check.check(path)
        (staging / MANIFEST_NAME).write_text(self._manifest.model_dump_json(), encoding="utf-8")
        staging.rename(self._target)
        shutil.rmtree(self._incoming)

    def _prune(self) -> None:
        versions = sorted(int(path.name) for path in self._home.iterdir() if re.fullmatch(r"\d{1,10}", path.name))
        others = [version for version in versions if version != self._manifest.version]
        for version in others[: max(0, len(others) - max(0, self._options.keep - 1))]:
            shutil.rmtree(self._home / str(version))
        for path in self._home.glob(".damaged-*"):
            shutil.rmtree(path)


def damage(directory: Path, manifest: Manifest) -> str | None:
    """Return what is wrong with a version's directory, None if every file verifies."""
    try:
        for entry in manifest.files:
            verify(directory / entry.name, entry)
    except (CorruptData, OSError) as error:
        return str(error)
    return None


def _recorded(directory: Path) -> tuple[FileEntry, ...]:
    """Return the files that a version's directory says it has; none if it says nothing legible."""
    try:
        return Manifest.model_validate_json((directory / MANIFEST_NAME).read_bytes()).files
    except (OSError, ValidationError):
        return ()


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:
        # Not every file system links; a copy costs only space.
        shutil.copyfile(source, target)


def _part_size(entry: FileEntry, index: int) -> int:
    return min(entry.part_bytes, entry.size - index * entry.part_bytes)
