"""The coordinator as the trainer sees it: gRPC Batches with our errors instead of status codes.

Invariants: a call waits for a coordinator for as long as none answers, and says so in the log, so that a restart of
the coordinator never ends a step; every call of a claim carries its fence; a reply of a coordinator with a lower
epoch than one seen before is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import grpc
import grpc.aio
import structlog
from rlharvest.errors import DataError, Fenced, NotFound, Unavailable
from rlharvest.rpc import Client
from rlharvest.v1 import batches_pb2, batches_pb2_grpc

log = structlog.get_logger(__name__)

Reply = TypeVar("Reply")
if TYPE_CHECKING:  # the stub of grpc.aio exists for type checkers only
    Method = Callable[[batches_pb2_grpc.BatchesAsyncStub], Callable[..., Awaitable[Reply]]]

_STALE_PAUSE_S = 0.2
_RETRY_S = 1.0


class Coordinator:
    """Calls to whichever coordinator leads."""

    def __init__(self, client: Client, *, patience_s: float = 30.0) -> None:
        self.epoch = 0
        """Highest epoch that a reply carried."""
        self._client = client
        self._patience_s = patience_s

    async def claim(self, *, trainer: str, instance: str, wait_s: float, devices: int) -> batches_pb2.Claimed | None:
        """Return a job to train, or None when there is none for `wait_s`."""
        request = batches_pb2.ClaimRequest(trainer=trainer, instance=instance, wait_s=wait_s, devices=devices)
        reply = await self._call(lambda stub: stub.Claim, request, timeout_s=wait_s + 5.0)
        return reply.claimed if reply.HasField("claimed") else None

    async def renew(
        self, job: str, fence: int, *, step: int, phase: str, obstacle: tuple[str, str] | None, timeout_s: float
    ) -> batches_pb2.RenewReply:
        """Keep the claim; one attempt, because the next renewal comes soon anyway. Raises Unavailable, Fenced.

        Args:
            obstacle: what the run waits for from outside: one word, and the same for people.
        """
        word, message = obstacle or ("", "")
        request = batches_pb2.RenewRequest(
            job=job, fence=fence, step=step, phase=phase, obstacle=word, obstacle_message=message
        )
        return await self._once(lambda stub: stub.Renew, request, timeout_s=timeout_s, total_s=timeout_s)

    async def next_batch(self, job: str, fence: int, *, step: int, after: int) -> batches_pb2.NextBatchReply:
        """Return the groups of a batch that are there by now, from position `after` on; maybe none."""
        request = batches_pb2.NextBatchRequest(job=job, fence=fence, step=step, after=after)
        while True:
            reply = await self._call(lambda stub: stub.NextBatch, request, timeout_s=20.0)
            if reply.epoch >= self.epoch:
                self.epoch = reply.epoch
                return reply
            log.warning("batch.refused", job=job, step=step, epoch=reply.epoch, seen=self.epoch)
            await asyncio.sleep(_STALE_PAUSE_S)

    async def report_step(
        self, job: str, fence: int, *, step: int, version: int, digest: str, metrics: Mapping[str, float]
    ) -> batches_pb2.Directive.ValueType:
        """Say that a step was done and published. Idempotent by (job, step, fence)."""
        request = batches_pb2.ReportStepRequest(
            job=job, fence=fence, step=step, version=version, digest=digest, metrics=metrics
        )
        reply = await self._call(lambda stub: stub.ReportStep, request)
        return reply.directive

    async def report_checkpoint(
        self, job: str, fence: int, *, step: int, version: int, path: str, digest: str, metrics: Mapping[str, float]
    ) -> None:
        """Say that a checkpoint is durable."""
        request = batches_pb2.ReportCheckpointRequest(
            job=job, fence=fence, step=step, version=version, path=path, digest=digest, metrics=metrics
        )
        await self._call(lambda stub: stub.ReportCheckpoint, request)

    async def finish(
        self,
        job: str,
        fence: int,
        outcome: batches_pb2.Outcome.ValueType,
        *,
        error: str = "",
        patience_s: float | None = None,
    ) -> None:
        """Let go of the job. With `patience_s` raises Unavailable when no coordinator answers for that long."""
        request = batches_pb2.FinishRequest(job=job, fence=fence, outcome=outcome, error=error)
        if patience_s is None:
            await self._call(lambda stub: stub.Finish, request)
        else:
            await self._once(lambda stub: stub.Finish, request, timeout_s=patience_s, total_s=patience_s)

    async def _call(self, method: Method[Reply], request: object, *, timeout_s: float = 10.0) -> Reply:
        while True:
            try:
                return await self._once(method, request, timeout_s=timeout_s, total_s=self._patience_s)
            except Unavailable as problem:
                log.warning("coordinator.waiting", why=str(problem))
                await asyncio.sleep(_RETRY_S)

    async def _once(self, method: Method[Reply], request: object, *, timeout_s: float, total_s: float) -> Reply:
        try:
            return await self._client.call(
                batches_pb2_grpc.BatchesStub, method, request, timeout_s=timeout_s, total_s=total_s
            )
        except grpc.aio.AioRpcError as error:
            details = error.details() or ""
            if error.code() is grpc.StatusCode.ABORTED:
                raise Fenced(details or "the claim of this job was lost") from error
            if error.code() is grpc.StatusCode.NOT_FOUND:
                raise NotFound(details or "the coordinator does not know this job") from error
            if error.code() in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.FAILED_PRECONDITION):
                raise DataError(f"the coordinator refuses the call: {details}") from error
            raise Unavailable(f"the coordinator answers {error.code().name}: {details}") from error
