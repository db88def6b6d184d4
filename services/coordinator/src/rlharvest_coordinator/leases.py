"""Leases: which job each worker serves, and with which version.

Level-triggered: a worker whose heartbeat shows another job, or an older version than the newest, is told again every second.
Which job it shall serve is decided by rlharvest.policies.leases.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.errors import Error as NatsError
from rlharvest.bus import NO_JOB, subject
from rlharvest.clock import Clock
from rlharvest.fleet.member import WorkerState
from rlharvest.policies.leases import Tenant, allot
from rlharvest.v1 import fleet_pb2

from rlharvest_coordinator.roster import Roster, Seat
from rlharvest_coordinator.run import Run

log = structlog.get_logger(__name__)

ROUND_S = 0.1

AGAIN_S = 1.0
"""A lease that a worker did not follow is sent again after this long."""

REQUEST_S = 2.0
"""How long a worker may take to answer."""

_LEASABLE = frozenset({WorkerState.JOINING, WorkerState.WARMING, WorkerState.READY})


class Leases:
    """Gives the workers of the roster to the runs."""

    def __init__(
        self,
        runs: dict[str, Run],
        roster: Roster,
        nats: Client,
        clock: Clock,
        *,
        epoch: Callable[[], int],
        weights_url: str,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self.runs = runs
        self.roster = roster
        self.nats = nats
        self.clock = clock
        self.epoch = epoch
        self.weights_url = weights_url
        self.spawn = spawn
        self.coming: set[str] = set()
        """Jobs under way that this coordinator may not have taken up yet: who serves one keeps it."""

    async def run(self) -> None:
        """Look at every worker, for ever."""
        while True:
            active = {run.id: run.scope.engine for run in list(self.runs.values()) if run.active}
            seats = {
                seat.id: seat
                for seat in self.roster.seats.values()
                if seat.member.state in _LEASABLE and not self._awaits(seat)
            }
            tenants = [
                Tenant(worker=seat.id, job=self._tenancy(seat), engines=frozenset(seat.engines), idle=not seat.held)
                for seat in seats.values()
            ]
            allotted = allot(tenants, active)
            now = self.clock.monotonic()
            for worker, seat in seats.items():
                job = allotted.get(worker)
                if job is not None:
                    version = self.runs[job].scope.row.version
                    assert version is not None
                    behind = seat.job != job or seat.version is None or seat.version < version
                    if seat.job == job and self._older(self.runs[job], seat.version, version):
                        continue  # a trainer that resumed replays steps: what the worker has is further on
                    fresh = seat.offered != (job, version)
                    if behind and (fresh or now - seat.leased_at > AGAIN_S):
                        seat.leased_at, seat.offered = now, (job, version)
                        self.spawn(self._lease(seat, self.runs[job], version))
                elif seat.job is not None and not self._holds(seat) and now - seat.leased_at > AGAIN_S:
                    seat.leased_at, seat.offered = now, None
                    self.spawn(self._lease(seat, None, 0))
            await asyncio.sleep(ROUND_S)

    def _older(self, run: Run, serving: int | None, offered: int) -> bool:
        """Whether the newest version stands for an earlier optimizer step than the one that a worker serves."""
        steps = run.scope.versions
        return serving in steps and offered in steps and steps[offered] < steps[serving]

    def _tenancy(self, seat: Seat) -> str | None:
        """Job that a worker serves: the one it was offered last, until it says another."""
        return seat.offered[0] if seat.offered is not None else seat.job

    def _awaits(self, seat: Seat) -> bool:
        """Whether it is not known yet what a worker serves, or the run of its job is still to come.

        A coordinator that takes over knows the workers before it has heard them, and before it has taken up the jobs.
        """
        return seat.heartbeat is None or (seat.job in self.coming and seat.job not in self.runs)

    def _holds(self, seat: Seat) -> bool:
        run = self.runs.get(seat.job or "")
        return run is not None and not run.closed and bool(run.scope.book.index.owned_by(seat.id, seat.incarnation))

    async def _lease(self, seat: Seat, run: Run | None, version: int) -> None:
        lease = fleet_pb2.Lease(epoch=self.epoch(), incarnation=seat.incarnation)
        if run is not None:
            lease = fleet_pb2.Lease(
                epoch=self.epoch(),
                incarnation=seat.incarnation,
                job=run.id,
                engine=run.scope.engine,
                weights_url=self.weights_url,
                target_version=version,
                kv=run.scope.spec.rollout.kv,
                rollout_json=run.scope.spec.rollout.model_copy(
                    update={"batch_invariant": run.scope.spec.batch_invariant}
                ).model_dump_json(),
                context=run.scope.prepared.context,
                tokenizer_digest=run.scope.prepared.tokenizer.digest,
            )
        try:
            answer = await self.nats.request(
                subject("lease", run.id if run is not None else NO_JOB, seat.id),
                lease.SerializeToString(),
                timeout=REQUEST_S,
            )
        except (TimeoutError, NatsError):
            return  # sent again while its heartbeats show that it is needed
        try:
            reply = fleet_pb2.LeaseReply.FromString(answer.data)
        except DecodeError as error:
            log.warning("lease.corrupt_reply", worker=seat.id, problem=str(error))
            return
        if not reply.accepted:
            log.warning("lease.refused", worker=seat.id, reason=reply.reason)
            if run is not None:
                data = {"worker": seat.id, "reason": reply.reason}
                run.scope.event("warn", "worker.refused", f"Worker {seat.id} cannot serve: {reply.reason}.", data)
