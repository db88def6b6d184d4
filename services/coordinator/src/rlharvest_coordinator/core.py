"""The part of the coordinator that leads: puts runs, fleet and ledger together, and tells each what it must hear.

A coordinator that does not lead serves reads from SQL and waits. Once it leads, every task here is supervised: one that dies
stops the process, and the next coordinator, or this one restarted, goes on from the log, the store and SQL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any

import structlog
from nats.aio.client import Client
from rlharvest.clock import Clock
from rlharvest.errors import Fenced
from rlharvest.fleet.member import Timing, WorkerState
from rlharvest.ids import new_id
from rlharvest.jobs.state import Status
from rlharvest.ledger.store import Store
from rlharvest.rpc import Client as RpcClient
from rlharvest.supervise import Supervisor, cancel
from rlharvest.v1 import fleet_pb2

from rlharvest_coordinator.batches import Batches
from rlharvest_coordinator.gateway.gateway import Gateway
from rlharvest_coordinator.journal import Journal
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.leader import Leadership
from rlharvest_coordinator.leases import Leases
from rlharvest_coordinator.log import Log
from rlharvest_coordinator.obstacles import TRANSIENT
from rlharvest_coordinator.roster import Roster, Seat
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.runs import Runs
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import jobs
from rlharvest_coordinator.versions import Versions
from rlharvest_coordinator.view import View

log = structlog.get_logger(__name__)


class Core:
    """One coordinator's working half."""

    def __init__(
        self,
        settings: CoordinatorSettings,
        nats: Client,
        store: Store,
        sessions: Sessions,
        clock: Clock,
        supervisor: Supervisor,
    ) -> None:
        self.settings = settings
        self.nats = nats
        self.store = store
        self.sessions = sessions
        self.clock = clock
        self.supervisor = supervisor
        self.runs: dict[str, Run] = {}
        self.leadership = Leadership(
            sessions, f"{new_id('crd')}@{socket.gethostname()}", clock, lease_s=settings.lease_s
        )
        self.keeper = Keeper(Log(nats), store, 0, self.leadership.advance)
        timing = Timing(heartbeat_s=settings.heartbeat_s, deadline_s=settings.heartbeat_deadline_s)
        self.roster = Roster(nats, sessions, clock, timing, lambda: self.epoch, most_workers=settings.most_workers)
        self.batches = Batches(
            self.runs,
            sessions,
            clock,
            epoch=lambda: self.epoch,
            checkpoints_dir=settings.checkpoints,
            deadline_s=settings.trainer_deadline_s,
            on_version=lambda run, version: self.versions.published(run, version),
        )
        self.leases = Leases(
            self.runs,
            self.roster,
            nats,
            clock,
            epoch=lambda: self.epoch,
            weights_url=settings.weights_url,
            spawn=self._spawn,
        )
        self.weights = RpcClient(settings.weights_grpc, settings.as_service)
        self.versions = Versions(
            self.weights, self.runs, self.roster, sessions, epoch=lambda: self.epoch, spawn=self._spawn
        )
        self.journal = Journal(nats, sessions, clock)
        self.jobs = Runs(
            self.runs,
            settings,
            nats,
            sessions,
            clock,
            keeper=self.keeper,
            roster=self.roster,
            leadership=self.leadership,
            leases=self.leases,
            journal=self.journal,
            epoch=lambda: self.epoch,
            queued=self.batches.queued,
            work=self._work,
        )
        self.view = View(self.runs, self.keeper, self.roster, epoch=lambda: self.epoch, changed=self.jobs.changed.set)
        self.gateway = Gateway(self.runs, sessions, epoch=lambda: self.epoch, most=settings.most_completions)
        self._ready = False
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def epoch(self) -> int:
        """Epoch that this coordinator leads in; 0: it does not, or is not ready to."""
        return self.leadership.epoch if self._ready else 0

    # --- leading ------------------------------------------------------------------------------------------------------

    async def lead(self) -> None:
        """Wait for the leadership, take over what is under way, and work until the process stops."""
        self.keeper.epoch = await self.leadership.acquire()
        self._work("leadership", self.leadership.hold())
        unfinished = await jobs.unfinished(self.sessions)
        self.leases.coming = {row.id for row in unfinished}
        self.keeper.listen(self._applied)
        self.keeper.on_recovery = self._recovered
        self.roster.prefix = self._prefix
        self.roster.history = self._history
        self.roster.on_beat = self._beat
        self.roster.on_loss = self._lost
        await self.keeper.start([row.id for row in unfinished if row.status != Status.VALIDATING])
        await self.roster.start()
        self._ready = True
        self._work("heartbeats", self.roster.listen())
        self._work("ledger", self.keeper.run())
        self._work("purge", self.keeper.purge())
        self._work("jobs", self._steady("jobs", self.jobs.run))
        self._work("fleet", self._steady("fleet", self._fleet))
        self._work("leases", self._steady("leases", self.leases.run))
        self._work("versions", self._steady("versions", self.versions.run))
        self._work("events", self._steady("events", self.journal.run))
        log.info("coordinator.leading", epoch=self.keeper.epoch, jobs=len(unfinished))

    def _work(self, name: str, coroutine: Coroutine[Any, Any, None], *, may_end: bool = False) -> None:
        task = self.supervisor.spawn(name, coroutine, may_end=may_end)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        """Stop working, then give the leadership up: whoever takes over finds nothing half said."""
        self._ready = False
        await cancel(list(self._tasks))
        await self.keeper.log.close()
        await self.leadership.release()
        await self.weights.close()

    async def _steady(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` for ever; what may be over at the next try is tried again."""
        while True:
            try:
                await work()
            except Fenced:
                await self.leadership.still()
            except TRANSIENT as error:
                log.warning("coordinator.retrying", task=name, error=repr(error))
                await asyncio.sleep(0.5)

    # --- hearing ------------------------------------------------------------------------------------------------------

    async def _applied(self, job: str, entries: Any) -> None:
        run = self.runs.get(job)
        if run is not None:
            await run.applied(entries)

    def _recovered(self) -> None:
        for run in self.runs.values():
            run.recovered()

    def _beat(self, seat: Seat) -> None:
        for job in {seat.job, seat.offered[0] if seat.offered else None}:
            run = self.runs.get(job) if job else None
            if run is not None:
                run.beat(seat)

    def _lost(self, seat: Seat, reason: str) -> None:
        for run in self.runs.values():
            run.scope.woken.set()
            if seat.job == run.id and not run.closed:
                run.scope.later(run.harvest.lost_worker())
                dead = seat.member.state is WorkerState.DEAD
                run.scope.event(
                    "warn" if dead else "info",
                    "worker.dead" if dead else "worker.left",
                    f"Worker {seat.id} {'is dead' if dead else 'left'}: {reason}.",
                    {"worker": seat.id, "reason": reason},
                )

    def _prefix(self, request: fleet_pb2.GetPrefixRequest) -> fleet_pb2.GetPrefixReply | None:
        run = self.runs.get(request.job)
        if run is None or run.closed:
            return None
        return run.courier.prefix(request.handle, request.attempt, request.worker)

    def _history(self, request: fleet_pb2.GetDraftsRequest) -> list[bytes]:
        run = self.runs.get(request.job)
        return run.history.segments(request.group) if run is not None and not run.closed else []

    # --- fleet --------------------------------------------------------------------------------------------------------

    async def _fleet(self) -> None:
        while True:
            await self.roster.tick()
            await self.batches.expire()
            await asyncio.sleep(self.settings.heartbeat_s / 2)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.supervisor.spawn("message", coroutine, may_end=True)
