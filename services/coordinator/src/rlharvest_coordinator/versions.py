"""The coordinator's side of the weight service: what may go, what must be there, and the end of a deleted job.

Invariants: a version that a worker serves, and the newest, are never given up; a newest version that the service lost is
found within CHECK_S and asked of the job's trainer again; the versions of a deleted job go, however long the service
was away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import grpc
import structlog
from rlharvest.errors import Unavailable
from rlharvest.rpc import Client
from rlharvest.v1 import weights_pb2, weights_pb2_grpc

from rlharvest_coordinator.roster import Roster
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import jobs

log = structlog.get_logger(__name__)

CHECK_S = 2.0

_CALL_S = 10.0


class Versions:
    """The versions of all jobs of this coordinator."""

    def __init__(
        self,
        client: Client,
        runs: dict[str, Run],
        roster: Roster,
        sessions: Sessions,
        *,
        epoch: Callable[[], int],
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.client = client
        self.runs = runs
        self.roster = roster
        self.sessions = sessions
        self.epoch = epoch
        self.spawn = spawn

    def published(self, run: Run, version: int) -> None:
        """A job has a new version: those that nobody needs may go."""
        run.lost_version = None
        serving = {
            seat.version for seat in self.roster.seats.values() if seat.job == run.id and seat.version is not None
        }
        request = weights_pb2.RetainRequest(
            job=run.id, versions=sorted({*serving, version}), keep_last=run.scope.spec.weights.keep_versions
        )
        self.spawn(self._retain(request))

    async def run(self) -> None:
        """Look after the newest versions and after deleted jobs, for ever."""
        while True:
            await asyncio.sleep(CHECK_S)
            for run in list(self.runs.values()):
                if run.active:
                    await self._look(run)
            for job in await jobs.unforgotten(self.sessions):
                await self._forget(job)

    async def _look(self, run: Run) -> None:
        version = run.scope.row.version
        request = weights_pb2.ListVersionsRequest(job=run.id)
        try:
            reply: weights_pb2.ListVersionsReply = await self.client.call(
                weights_pb2_grpc.WeightsStub, lambda stub: stub.List, request, timeout_s=2, total_s=2
            )
        except (Unavailable, grpc.aio.AioRpcError) as error:
            log.debug("weights.unreachable", job=run.id, error=repr(error))
            return
        if version is None or version != run.scope.row.version:
            return  # there is a newer one by now
        there = any(known.version == version for known in reply.versions)
        if there:
            run.lost_version = None
        elif run.lost_version != version:
            run.lost_version = version
            sentence = f"The weight service has no version {version} any more; the trainer publishes it again."
            run.scope.event("error", "weights.lost", sentence, {"version": version})

    async def _forget(self, job: str) -> None:
        request = weights_pb2.ForgetRequest(job=job)
        try:
            await self.client.call(
                weights_pb2_grpc.WeightsStub, lambda stub: stub.Forget, request, timeout_s=_CALL_S, total_s=_CALL_S
            )
        except (Unavailable, grpc.aio.AioRpcError) as error:
            log.warning("weights.forget_failed", job=job, error=repr(error))  # the next round asks again
            return
        await jobs.forgotten(self.sessions, job, epoch=self.epoch())
        log.info("weights.forgotten", job=job)

    async def _retain(self, request: weights_pb2.RetainRequest) -> None:
        try:
            await self.client.call(
                weights_pb2_grpc.WeightsStub, lambda stub: stub.Retain, request, timeout_s=_CALL_S, total_s=20
            )
        except (Unavailable, grpc.aio.AioRpcError) as error:
            log.warning("weights.retain_failed", job=request.job, error=repr(error))  # the next version asks again
