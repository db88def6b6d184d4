"""The coordinator's Fleet service, as a worker calls it.

Invariant: the token that all workers share is sent to be admitted; every other call carries the worker's own credential,
once it has one.
"""

from __future__ import annotations

import asyncio
import os
import platform
import socket

import grpc.aio
import structlog
from rlharvest import rpc
from rlharvest.accounts import Candidate, Credential
from rlharvest.credentials import Caller, Tokens
from rlharvest.errors import Unavailable
from rlharvest.v1 import fleet_pb2, fleet_pb2_grpc

from rlharvest_rollout.settings import RolloutSettings

log = structlog.get_logger(__name__)

_CLASSES = {
    "reserved": fleet_pb2.WORKER_CLASS_RESERVED,
    "preemptible": fleet_pb2.WORKER_CLASS_PREEMPTIBLE,
}


class Fleet:
    """Is admitted, joins, leaves, and fetches prefixes.

    Args:
        candidate: this worker's key, and its name.
        build: what it runs, for people.
    """

    def __init__(self, settings: RolloutSettings, candidate: Candidate, build: str) -> None:
        self.credential: Credential | None = None
        """For NATS, renewed in place; None: NATS asks for none."""
        self._admitted = False
        self._settings = settings
        self._candidate = candidate
        self._worker = candidate.name
        self._build = build
        self._joining = rpc.Client(settings.coordinator_grpc, settings.as_worker)
        self._client = rpc.Client(settings.coordinator_grpc, settings.as_worker)

    async def admit(self) -> float:
        """Get a credential, or renew it; return for how many seconds it is good. Waits for as long as it takes."""
        candidate = self._candidate
        request = fleet_pb2.AdmitRequest(worker=candidate.name, public_key=candidate.key, proof=candidate.proof)
        while True:
            try:
                reply: fleet_pb2.AdmitReply = await self._joining.call(
                    fleet_pb2_grpc.FleetStub, lambda stub: stub.Admit, request, timeout_s=2.0, total_s=15.0
                )
            except (Unavailable, grpc.aio.AioRpcError) as error:
                log.warning("worker.not_admitted", error=str(error))
                await asyncio.sleep(0.5)
                continue
            self._admitted = True
            if reply.jwt:
                if self.credential is None:
                    self.credential = Credential(reply.jwt, candidate.seed)
                self.credential.jwt = reply.jwt
                self._client.caller = Caller(Tokens([reply.jwt]), self._settings.tls)
            return reply.seconds

    async def admitted(self) -> str | None:
        """A health check: None when a coordinator has let it in."""
        return None if self._admitted else "no coordinator has admitted it yet"

    async def register(self, *, numerics_key: str, batch_invariant: bool) -> fleet_pb2.RegisterReply:
        """Join; waits for a leading coordinator for as long as it takes."""
        request = fleet_pb2.RegisterRequest(
            worker=self._worker,
            hostname=socket.gethostname(),
            pid=os.getpid(),
            worker_class=_CLASSES[self._settings.worker_class],
            engines=self._settings.leasable_engines,
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
        request = fleet_pb2.GetPrefixRequest(job=job, handle=handle, attempt=attempt, worker=self._worker)
        return await self._client.call(
            fleet_pb2_grpc.FleetStub, lambda stub: stub.GetPrefix, request, timeout_s=5.0, total_s=20.0
        )

    async def get_drafts(self, job: str, group: int) -> fleet_pb2.GetDraftsReply:
        """Return the history of a group's prompt.

        Raises:
            grpc.aio.AioRpcError: the coordinator cannot give it.
            Unavailable: no coordinator answered.
        """
        request = fleet_pb2.GetDraftsRequest(job=job, group=group, worker=self._worker)
        return await self._client.call(
            fleet_pb2_grpc.FleetStub, lambda stub: stub.GetDrafts, request, timeout_s=5.0, total_s=5.0
        )

    async def close(self) -> None:
        await self._joining.close()
        await self._client.close()
