"""Publish a directory as a version: one call that says what the weight service lacks, uploads, one that makes it.

Invariants: a file is read twice (hash, upload) and the service hashes what it receives, so a file that changes
meanwhile is refused, never published; nothing is visible before the last call; the whole is idempotent by (job, key),
so that a trainer that died anywhere in it does it again.
"""

from __future__ import annotations

import asyncio
import json
import select
from collections.abc import Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
import structlog
from pydantic import ValidationError

from rlharvest import rpc
from rlharvest.credentials import Caller
from rlharvest.errors import Conflict, CorruptData, DataError, DiskFull, InvalidField
from rlharvest.rpc_faults import DISK_FULL, ERROR_KEY
from rlharvest.v1 import weights_pb2, weights_pb2_grpc
from rlharvest.weights import safetensors_check
from rlharvest.weights.manifest import MANIFEST_BYTES, PART_BYTES, FileEntry, Manifest, describe
from rlharvest.weights.transfer import BLOCK_BYTES, TRANSIENT, Progress, Transfer, in_thread

log = structlog.get_logger(__name__)

Reply = TypeVar("Reply")


@dataclass(frozen=True)
class Published:
    """A version that exists now."""

    version: int
    digest: str
    manifest: Manifest
    uploaded_bytes: int
    """0 if the service had every file already."""


class Publisher:
    """Publishes versions to one weight service.

    Args:
        http_url: where blobs go, e.g. http://127.0.0.1:7083.
        grpc_address: where versions are made, e.g. 127.0.0.1:7084.
        threads: files uploaded at once.
        timeout_s: a connection that stands still for this long has failed.
        total_s: time limit of one `publish`.
        caller: how this process shows itself to the service.
    """

    def __init__(
        self,
        http_url: str,
        grpc_address: str,
        *,
        threads: int = 4,
        timeout_s: float = 30.0,
        total_s: float = 1800.0,
        part_bytes: int = PART_BYTES,
        caller: Caller | None = None,
    ) -> None:
        self._http_url = http_url
        self._caller = caller or Caller()
        self._rpc = rpc.Client(grpc_address, self._caller)
        self._threads = threads
        self._timeout_s = timeout_s
        self._total_s = total_s
        self._part_bytes = part_bytes

    async def publish(
        self,
        directory: Path,
        *,
        job: str,
        step: int,
        parent: int | None,
        key: str,
        tokenizer_digest: str = "",
        least: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Published:
        """Make a version of the files in `directory` (not of its subdirectories, nor of hidden files).

        Args:
            step: optimizer steps done.
            parent: version it was trained from.
            key: names this publication within the job, e.g. `<fence>:<step>`; the same key never makes two versions.
            least: the version's number is at least this.
            progress: called on the event loop with (bytes the service has, bytes in all).

        Raises:
            InvalidField: there is nothing to publish, or a file's name cannot be used.
            CorruptData: a safetensors file is not whole, or a file changes while it is published.
            Unavailable: the service did not answer within the time limit.
            DiskFull: the service has no space; what was published before is intact.
            Conflict: the key was used for other content, the job was deleted, or it has as many versions as it may.
        """
        paths = await asyncio.to_thread(publishable, directory)
        transfer = Transfer(self._http_url, timeout_s=self._timeout_s, total_s=self._total_s, caller=self._caller)
        entries = await in_thread(lambda: self._describe(paths, transfer), transfer)
        try:
            manifest = Manifest(
                job=job, step=step, parent=parent, tokenizer_digest=tokenizer_digest, files=tuple(entries)
            )
        except ValidationError as error:
            raise DataError(f"{directory} cannot be published: {error}") from error
        text = manifest.model_dump_json()
        if len(text) > MANIFEST_BYTES:
            problem = f"its manifest has {len(text)} bytes; the limit is {MANIFEST_BYTES}"
            raise InvalidField("directory", str(directory), problem, "Write fewer, larger shards")
        files = {entry.blake3: path for entry, path in zip(entries, paths, strict=True)}
        uploaded = 0
        # A blob that was there may be collected before the version names it; then it is uploaded again.
        for last in (False, True):
            missing = await self._begin(text, directory)
            counter = Progress(sum(entry.size for entry in manifest.blobs), progress)
            counter.add(sum(entry.size for entry in manifest.blobs if entry.blake3 not in missing))
            upload = _Upload({digest: files[digest] for digest in missing}, transfer, counter, self._threads)
            uploaded += await in_thread(upload.run, transfer)
            try:
                reply = await self._publish(manifest, text, key, least)
                break
            except _Refused as error:
                if last:
                    raise DataError(f"the weight service refuses to publish {directory}: {error}") from error
        log.debug("weights.published", job=job, version=reply.version, step=step, uploaded_bytes=uploaded)
        return Published(
            version=reply.version,
            digest=reply.digest,
            manifest=manifest.model_copy(update={"version": reply.version}),
            uploaded_bytes=uploaded,
        )

    async def close(self) -> None:
        """Close the gRPC channel."""
        await self._rpc.close()

    def _describe(self, paths: list[Path], transfer: Transfer) -> list[FileEntry]:
        entries = []
        for path in paths:
            transfer.check()
            if path.suffix == ".safetensors":
                safetensors_check.check(path)
            try:
                entries.append(describe(path, part_bytes=self._part_bytes))
            except ValidationError as error:
                raise InvalidField(
                    "directory", str(path), "not a plain file name", "Use letters, digits, '.', '_' and '-'"
                ) from error
        return entries

    async def _call(self, method: Callable[[Any], Callable[..., Awaitable[Reply]]], request: object) -> Reply:
        return await self._rpc.call(
            weights_pb2_grpc.WeightsStub, method, request, timeout_s=self._timeout_s, total_s=self._total_s
        )

    async def _begin(self, manifest_json: str, directory: Path) -> list[str]:
        request = weights_pb2.BeginRequest(manifest_json=manifest_json)
        try:
            reply: weights_pb2.BeginReply = await self._call(lambda stub: stub.Begin, request)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.INVALID_ARGUMENT:
                refusal = f"the weight service refuses to publish {directory}: {error.details()}"
                raise DataError(refusal) from error
            _translate(error)
        return list(reply.missing)

    async def _publish(self, manifest: Manifest, text: str, key: str, least: int) -> weights_pb2.PublishReply:
        request = weights_pb2.PublishRequest(job=manifest.job, key=key, manifest_json=text, least_version=least)
        try:
            reply: weights_pb2.PublishReply = await self._call(lambda stub: stub.Publish, request)
        except grpc.aio.AioRpcError as error:
            _translate(error)
        return reply


class _Refused(DataError):
    """The manifest was refused."""


def _translate(error: grpc.aio.AioRpcError) -> NoReturn:
    """Raise the error of ours that a status of the weight service stands for; others as they are."""
    details = error.details() or ""
    match error.code():
        case grpc.StatusCode.INVALID_ARGUMENT:
            raise _Refused(details) from error
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            if (ERROR_KEY, DISK_FULL) in [tuple(pair) for pair in error.trailing_metadata() or ()]:
                raise DiskFull(details) from error
            raise Conflict(details) from error
        case grpc.StatusCode.ABORTED:
            raise Conflict(details) from error
    raise error


def publishable(directory: Path) -> list[Path]:
    """Return the files of a directory that make up a version, by name; links are followed.

    Raises:
        InvalidField: it is no directory, or has no file.
    """
    if not directory.is_dir():
        raise InvalidField("directory", str(directory), "not a directory", "Give a Hugging Face model directory")
    paths = sorted(path for path in directory.iterdir() if path.is_file() and not path.name.startswith("."))
    if not paths:
        raise InvalidField("directory", str(directory), "it has no files", "Give a Hugging Face model directory")
    return paths


class _Upload:
    """Brings files to the blob store; blocking."""

    def __init__(self, files: dict[str, Path], transfer: Transfer, progress: Progress, threads: int) -> None:
        self._files = files
        self._transfer = transfer
        self._progress = progress
        self._threads = threads

    def run(self) -> int:
        """Upload what is missing; return the bytes uploaded."""
        with ThreadPoolExecutor(self._threads, "weights") as pool:
            futures = [pool.submit(self._bring, digest, path) for digest, path in self._files.items()]
            try:
                return sum(future.result() for future in futures)
            except BaseException:
                self._transfer.cancel()
                pool.shutdown(wait=True, cancel_futures=True)
                raise

    def _bring(self, digest: str, path: Path) -> int:
        tries = 0
        while True:
            size = path.stat().st_size
            try:
                self._put(digest, path, size)
                return size
            except TRANSIENT as error:
                problem: Exception = error
            self._transfer.drop()
            self._transfer.pause(tries, f"{path.name}: {problem!r}")
            tries += 1

    def _put(self, digest: str, path: Path, size: int) -> None:
        connection = self._transfer.connection()
        with path.open("rb") as file:
            connection.putrequest("PUT", f"{self._transfer.prefix}/v1/blobs/{digest}", skip_accept_encoding=True)
            connection.putheader("Content-Length", str(size))
            connection.putheader("Content-Type", "application/octet-stream")
            for name, value in self._transfer.caller.headers.items():
                connection.putheader(name, value)
            connection.endheaders()
            sent = 0
            try:
                # An answer before the end is a refusal; there is no use in sending on.
                while sent < size and not select.select([connection.sock], [], [], 0)[0]:
                    self._transfer.check()
                    block = file.read(BLOCK_BYTES)
                    if not block:
                        self._transfer.drop()
                        raise CorruptData(f"{path.name} became shorter while it was uploaded")
                    sent += len(block)
                    self._progress.add(len(block))
                    connection.send(block)
                reply = connection.getresponse()
            except (BrokenPipeError, ConnectionResetError):
                # The server closed; its answer may be here already.
                reply = connection.getresponse()
            except BaseException:
                self._progress.add(-sent)
                raise
            body = reply.read()
        if reply.status in (200, 201):
            return
        self._progress.add(-sent)
        problem = _message(body) or f"status {reply.status}"
        if reply.status == 507:
            raise DiskFull(f"{path.name}: {problem}")
        if reply.status == 400:
            raise CorruptData(f"{path.name}: {problem}")
        if 400 < reply.status < 500 and reply.status not in (408, 429):
            raise DataError(f"{path.name}: {problem}")
        raise ConnectionError(problem)


def _message(body: bytes) -> str:
    """Return the message of an error envelope, "" if the body is none."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        return ""
