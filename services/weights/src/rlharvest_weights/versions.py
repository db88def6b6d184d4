"""Versions: numbered manifests of jobs, published atomically over the blobs that they name.

    <root>/jobs/<job>/state.json            last number, publications by key, whether the job was deleted
    <root>/jobs/<job>/versions/<n>.json     the manifest of a version that can be pulled

Invariants: a manifest is written after everything it names is durable, so a version that is listed can be pulled; its
number is reserved in state.json first, so no number is used twice, whatever crashes or is deleted; one (job, key) makes
one version: a publisher that comes again gets the same number, also when the crash was between the two writes; a number
is never below what the publisher asks for, so that numbers go on above all that were ever seen even where this directory
was lost.
"""

from __future__ import annotations

import fcntl
import re
import threading
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO, Protocol

import structlog
from pydantic import BaseModel, ConfigDict, ValidationError
from rlharvest.errors import Conflict, CorruptData, InvalidField, LimitReached, NotFound
from rlharvest.weights.manifest import Manifest

from rlharvest_weights import durable

log = structlog.get_logger(__name__)

KEYS_KEPT = 64
"""Publications of a job that are remembered by key; a publisher comes again soon or not at all."""

MOST_KEY_CHARACTERS = 200
"""Of a publication's key."""

MOST_VERSIONS = 4096
"""Of a job, at a time: whoever publishes so many without a Retain does not mean to."""

_JOB = re.compile(r"[A-Za-z0-9_\-]{1,100}")


class Blobs(Protocol):
    """What versions need of the blob store."""

    def size(self, digest: str) -> int | None: ...
    def renew(self, digest: str) -> bool: ...
    def require(self, needed: int) -> None: ...
    def settle(self, digest: str) -> None: ...
    def leased(self, digest: str) -> bool: ...
    def delete(self, digest: str) -> int: ...
    def digests(self) -> Iterable[str]: ...


class Publication(BaseModel):
    """What a key stands for."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    version: int
    digest: str
    deleted: bool = False


class JobState(BaseModel):
    """What outlives a job's versions."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    last: int = -1
    deleted: bool = False
    keys: dict[str, Publication] = {}


class VersionStore:
    """The versions of all jobs. Blocking; safe to use from several threads of the one process that holds the lock.

    Args:
        max_blob_bytes: larger files are refused before they are sent.

    Raises:
        Conflict: another process has the directory.
    """

    def __init__(self, root: Path, blobs: Blobs, *, max_blob_bytes: int = 64 << 30) -> None:
        self._max_blob_bytes = max_blob_bytes
        self._jobs = root / "jobs"
        self._blobs = blobs
        self._lock = threading.RLock()
        self._states: dict[str, JobState] = {}
        self._versions: dict[str, dict[int, Manifest]] = {}
        self._named: Counter[str] = Counter()
        self._broken: dict[str, str] = {}
        self._jobs.mkdir(parents=True, exist_ok=True)
        for directory in self._jobs.iterdir():
            self._load(directory)

    def begin(self, manifest: Manifest) -> list[str]:
        """Return the blobs that a version lacks, and renew the leases of those that are here.

        Raises:
            InvalidField: a file is too large.
            Conflict: the job was deleted.
            DiskFull: there is no space for what is missing.
        """
        _check_job(manifest.job)
        with self._lock:
            self._state(manifest.job)
        for entry in manifest.files:
            if entry.size > self._max_blob_bytes:
                raise InvalidField(
                    f"manifest.files.{entry.name}.size",
                    entry.size,
                    f"the limit is {self._max_blob_bytes} bytes",
                    "Write smaller shards (weights.shard_bytes), or set RLHARVEST_MAX_BLOB_BYTES on the weight service",
                )
        missing = [entry for entry in manifest.blobs if not self._blobs.renew(entry.blake3)]
        self._blobs.require(sum(entry.size for entry in missing))
        return [entry.blake3 for entry in missing]

    def publish(self, job: str, key: str, manifest: Manifest, *, least: int = 0) -> tuple[Manifest, bool]:
        """Return the version that (job, key) stands for, and whether this call made it.

        Args:
            least: a new version's number is at least this.

        Raises:
            InvalidField: the manifest names another job, a blob that is missing or has another size, or no such parent.
            Conflict: the key stands for other content already, or the job was deleted.
            DiskFull: there is no space; nothing was published.
            LimitReached: the job has too many versions.
        """
        _check_job(job)
        if not 0 < len(key) <= MOST_KEY_CHARACTERS:
            raise InvalidField(
                "key", key, f"it has {len(key)} characters", f"Give 1 to {MOST_KEY_CHARACTERS}, e.g. '<fence>:<step>'"
            )
        if manifest.job != job:
            raise InvalidField("manifest.job", manifest.job, f"the call is for {job}", "Give the same job in both")
        with self._lock:
            state = self._state(job)
            known = state.keys.get(key)
            if known is not None:
                made = self._versions.get(job, {}).get(known.version)
                if known.digest != manifest.digest and (made is not None or known.deleted):
                    raise Conflict(
                        f"key {key!r} of {job} stands for version {known.version} with digest {known.digest}; "
                        f"{manifest.digest} is other content. Use another key"
                    )
                if made is not None:
                    return made, False
                if known.deleted:
                    return manifest.model_copy(update={"version": known.version}), False
            if len(self._versions.get(job, {})) >= MOST_VERSIONS:
                raise LimitReached(f"versions of {job}", MOST_VERSIONS, "Delete old ones (Retain).")
            number = max(state.last + 1, least) if known is None else known.version
            self._check_manifest(manifest, number)
            manifest = manifest.model_copy(update={"version": number, "created_at": time.time()})
            keys = {**state.keys, key: Publication(version=number, digest=manifest.digest)}
            if len(keys) > KEYS_KEPT:
                del keys[min(keys, key=lambda name: keys[name].version)]
            self._save(job, state.model_copy(update={"last": max(state.last, number), "keys": keys}))
            durable.write(self._file(job, number), manifest.model_dump_json().encode())
            self._versions.setdefault(job, {})[number] = manifest
            for entry in manifest.blobs:
                self._named[entry.blake3] += 1
                self._blobs.settle(entry.blake3)
            return manifest, True

    def listed(self, job: str) -> list[Manifest]:
        """Return the versions of a job that can be pulled, oldest first."""
        _check_job(job)
        with self._lock:
            return [manifest for _, manifest in sorted(self._versions.get(job, {}).items())]

    def get(self, job: str, number: int) -> Manifest:
        """Return a version; raise NotFound if it cannot be pulled (any more)."""
        _check_job(job)
        with self._lock:
            versions = self._versions.get(job, {})
            if number not in versions:
                newest = f"the newest is {max(versions)}" if versions else "the job has none"
                raise NotFound(f"there is no version {number} of {job}; {newest}")
            return versions[number]

    def retain(self, job: str, keep: Iterable[int], keep_last: int) -> tuple[list[int], int]:
        """Delete versions except those in `keep` and the newest `keep_last`; return (deleted numbers, freed bytes)."""
        _check_job(job)
        with self._lock:
            numbers = sorted(self._versions.get(job, {}))
            kept = {*keep, *numbers[len(numbers) - min(keep_last, len(numbers)) :]}
            doomed = [number for number in numbers if number not in kept]
            return doomed, self._delete(job, doomed) if doomed else 0

    def forget(self, job: str) -> int:
        """Delete a job's versions and refuse new ones; return the freed bytes. Idempotent."""
        _check_job(job)
        with self._lock:
            self._save(job, self._states.get(job, JobState()).model_copy(update={"deleted": True}))
            self._broken.pop(job, None)
            return self._delete(job, sorted(self._versions.get(job, {})))

    def collect(self) -> int:
        """Delete blobs that no version names and whose lease is over; return the freed bytes."""
        return self._collect(self._blobs.digests())

    def count(self) -> tuple[int, int]:
        """Return (versions, bytes of their distinct blobs)."""
        with self._lock:
            manifests = [manifest for versions in self._versions.values() for manifest in versions.values()]
            sizes = {entry.blake3: entry.size for manifest in manifests for entry in manifest.files}
            return len(manifests), sum(sizes.values())

    def _collect(self, digests: Iterable[str]) -> int:
        freed = 0
        for digest in digests:
            with self._lock:
                if not self._named[digest] and not self._blobs.leased(digest):
                    freed += self._blobs.delete(digest)
                if not self._named[digest]:
                    del self._named[digest]
        return freed

    def _delete(self, job: str, numbers: list[int]) -> int:
        state = self._states.get(job, JobState())
        keys = {
            key: publication.model_copy(update={"deleted": True}) if publication.version in numbers else publication
            for key, publication in state.keys.items()
        }
        self._save(job, state.model_copy(update={"keys": keys}))
        digests: list[str] = []
        for number in numbers:
            self._file(job, number).unlink(missing_ok=True)
            manifest = self._versions[job].pop(number)
            digests.extend(entry.blake3 for entry in manifest.blobs)
        if numbers:
            durable.sync_directory(self._file(job, 0).parent)
        self._named.subtract(digests)
        return self._collect(set(digests))

    def _check_manifest(self, manifest: Manifest, number: int) -> None:
        if manifest.parent is not None and not 0 <= manifest.parent < number:
            raise InvalidField(
                "manifest.parent", manifest.parent, f"the next version is {number}", "Name an earlier version, or none"
            )
        for entry in manifest.files:
            size = self._blobs.size(entry.blake3)
            if size is None:
                raise InvalidField(
                    f"manifest.files.{entry.name}", entry.blake3, "there is no such blob", "Upload it first"
                )
            if size != entry.size:
                raise InvalidField(
                    f"manifest.files.{entry.name}.size", entry.size, f"the blob has {size} bytes", "Describe it again"
                )

    def _state(self, job: str) -> JobState:
        if job in self._broken:
            raise CorruptData(self._broken[job])
        state = self._states.get(job, JobState())
        if state.deleted:
            raise Conflict(f"{job} was deleted; it gets no new versions")
        return state

    def _save(self, job: str, state: JobState) -> None:
        durable.write(self._jobs / job / "state.json", state.model_dump_json().encode())
        self._states[job] = state

    def _file(self, job: str, number: int) -> Path:
        return self._jobs / job / "versions" / f"{number}.json"

    def _load(self, directory: Path) -> None:
        job = directory.name
        for leftover in directory.rglob(f"*{durable.TEMPORARY_SUFFIX}"):
            leftover.unlink()
        try:
            state = JobState.model_validate_json((directory / "state.json").read_bytes())
        except FileNotFoundError:
            state = JobState()
        except ValidationError as error:
            self._broken[job] = (
                f"{directory / 'state.json'} is damaged; restore it from a copy, or delete the job: {error}"
            )
            log.error("weights.damaged", job=job, problem=self._broken[job])
            state = JobState()
        numbers = [int(path.stem) for path in directory.glob("versions/*.json") if path.stem.isdecimal()]
        self._states[job] = state.model_copy(update={"last": max([state.last, *numbers])})
        # A deletion that a crash cut short is finished.
        gone = {publication.version for publication in state.keys.values() if publication.deleted}
        for number in numbers:
            if state.deleted or number in gone:
                self._file(job, number).unlink()
                continue
            try:
                manifest = Manifest.model_validate_json(self._file(job, number).read_bytes())
                self._check_manifest(manifest, number)
            except (ValidationError, InvalidField) as error:
                log.error("weights.damaged", job=job, version=number, problem=str(error))
                continue
            self._versions.setdefault(job, {})[number] = manifest
            self._named.update(entry.blake3 for entry in manifest.blobs)


def claim(root: Path) -> BinaryIO:
    """Take the directory for this process, until the object returned is closed or the process ends.

    Raises:
        Conflict: another process has it.
    """
    root.mkdir(parents=True, exist_ok=True)
    lock = (root / "lock").open("wb")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        lock.close()
        raise Conflict(f"another weight service uses {root}. Stop it, or set RLHARVEST_DATA_DIR") from error
    return lock


def _check_job(job: str) -> None:
    if not _JOB.fullmatch(job):
        raise InvalidField("job", job, "not a job id", "Use letters, digits, '_' and '-', at most 100")
