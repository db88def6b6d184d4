"""The coordinator's Fleet service, as a worker calls it."""

from __future__ import annotations

import asyncio
import os
import platform
import socket

import grpc.aio
import structlog
from rlharvest import rpc
from rlharvest.errors import Unavailable
from rlharvest.v1 import fleet_pb2, fleet_pb2_grpc

from rlharvest_rollout.settings import RolloutSettings

log = structlog.get_logger(__name__)

_CLASSES = {
    "reserved": fleet_pb2.WORKER_CLASS_RESERVED,
    "preemptible": fleet_pb2.WORKER_CLASS_PREEMPTIBLE,
}


class Fleet:
    """Joins, leaves, and fetches prefixes."""

    def __init__(self, settings: RolloutSettings, worker: str, build: str) -> None:
        self._settings = settings
        self._worker = worker
        self._build = build
        self._client = rpc.Client(settings.coordinator_grpc)

    async def register(self, *, numerics_key: str, batch_invariant: bool) -> fleet_pb2.RegisterReply:
        """Join; waits for a leading coordinator for as long as it takes."""
        request = fleet_pb2.RegisterRequest(
            worker=self._worker,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            worker_class=_CLASSES[self._settings.worker_class],
            engines=self._settings.offered_engines,
            slots=self._settings.slots,
            numerics_key=numerics_key,
            batch_invariant=batch_invariant,
            build=f"{self._build} python-{platform.python_version()}",
            worker_type=self._settings.worker_type,
        )
        while True:
            try:
                return await self._client.call(
                    fleet_pb2_grpc.FleetStub, lambda stub: stub.Register, request, timeout_s=2.0, total_s=15.0
                )
            except (Unavailable, grpc.aio.AioRpcError) as error:
                log.warning("worker.cannot_join", error=str(error))
                await asyncio.sleep(0.5)

    async def leave(self, incarnation: int, reason: str, *, total_s: float) -> None:
        """Hand everything back.

        Raises:
            Unavailable: no coordinator answered; the missing heartbeats will say the same.
        """
        request = fleet_pb2.LeaveRequest(worker=self._worker, incarnation=incarnation, reason=reason)
        await self._client.call(
            fleet_pb2_grpc.FleetStub, lambda stub: stub.Leave, request, timeout_s=total_s, total_s=total_s
        )

    async def get_prefix(self, job: str, handle: int, attempt: int) -> fleet_pb2.GetPrefixReply:
        """Return prompt and prefix of a response.

        Raises:
            grpc.aio.AioRpcError: FAILED_PRECONDITION if the attempt no longer owns the response.
            Unavailable: no coordinator answered.
        """
        request = fleet_pb2.GetPrefixRequest(job=job, handle=handle, attempt=attempt)
        return await self._client.call(
            fleet_pb2_grpc.FleetStub, lambda stub: stub.GetPrefix, request, timeout_s=5.0, total_s=20.0
        )

    async def close(self) -> None:
        await self._client.close()
