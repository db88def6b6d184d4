"""The part of the coordinator that leads: runs the jobs, keeps the fleet, and answers the API (live.LiveView).

A coordinator that does not lead serves reads from SQL and waits. Once it leads, every task here is supervised: one that dies
stops the process, and the next coordinator, or this one restarted, goes on from the log, the store and SQL.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine, Mapping
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError
from rlharvest.bus import EVENTS, parse_subject, subject
from rlharvest.clock import Clock
from rlharvest.errors import (
    Conflict,
    CorruptData,
    DataError,
    DiskFull,
    Fenced,
    InfrastructureError,
    NotFound,
    NotLeader,
)
from rlharvest.fleet.member import ENDED, Timing, WorkerState
from rlharvest.ids import new_id
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import TERMINAL, Move, Status
from rlharvest.ledger.store import Store
from rlharvest.rpc import Client as RpcClient
from rlharvest.spans import Finish
from rlharvest.supervise import Supervisor, cancel
from rlharvest.testing.stub import parse_options
from rlharvest.v1 import events_pb2, fleet_pb2
from sqlalchemy.exc import DBAPIError

from rlharvest_coordinator import live as views
from rlharvest_coordinator import obstacles, sql
from rlharvest_coordinator.api.resources import sample_resource
from rlharvest_coordinator.batches import Batches
from rlharvest_coordinator.data.prepare import Prepared, prepare, reopen
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.leader import Leadership
from rlharvest_coordinator.leases import Leases
from rlharvest_coordinator.log import Log
from rlharvest_coordinator.roster import Roster, Seat
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import events, jobs
from rlharvest_coordinator.tables import Job
from rlharvest_coordinator.versions import Versions

log = structlog.get_logger(__name__)

ROUND_S = 0.25
"""A run looks at everything at least this often, besides whenever something happens."""

TRANSIENT = (InfrastructureError, *sql.FAULTS, TimeoutError, NatsError)
"""What may be over at the next try."""


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
        self.roots = [root.absolute() for root in settings.roots]
        self.corrupt_events = 0
        """Messages on the subjects of events that were none."""
        self._ready = False
        self._preparing: set[str] = set()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._changed = asyncio.Event()

    # --- live.LiveView ------------------------------------------------------------------------------------------------

    @property
    def leading(self) -> bool:
        return self._ready and self.leadership.epoch > 0

    @property
    def epoch(self) -> int:
        """Epoch that this coordinator leads in; 0: it does not, or is not ready to."""
        return self.leadership.epoch if self._ready else 0

    def job(self, job: str) -> views.LiveJob | None:
        run = self.runs.get(job)
        return run.live() if run is not None and not run.closed and job in self.keeper.books else None

    def workers(self) -> list[views.LiveWorker]:
        return [self.roster.live(seat) for seat in self.roster.seats.values()]

    async def drain(self, worker: str, reason: str) -> None:
        seat = self.roster.seats.get(worker)
        if not self.leading:
            raise NotLeader
        if seat is None or seat.member.state in ENDED:
            raise NotFound(f"there is no worker {worker!r} to drain")
        await self.roster.drain(seat, reason)

    async def live_sample(self, job: str, handle: int) -> dict[str, Any] | None:
        run = self.runs.get(job)
        response = run.scope.book.responses.get(handle) if run is not None and not run.closed else None
        if run is None or response is None:
            return None
        group = run.scope.book.groups[response.group]
        shown = sample_resource(run.harvest.sample(group, response), None)
        unknown: dict[str, Any] = {"state": response.state.name.lower()}
        if response.finish is Finish.NONE:
            unknown["finish"] = None
        if response.score is None:
            unknown["reward"] = None
        return shown.model_copy(update=unknown).model_dump()

    async def live_samples(self, job: str, limit: int) -> list[dict[str, Any]]:
        run = self.runs.get(job)
        if run is None or run.closed:
            return []
        newest = sorted(run.scope.book.responses, reverse=True)[:limit]
        found = [await self.live_sample(job, handle) for handle in newest]
        return [sample for sample in found if sample is not None]

    def wake(self, job: str) -> None:
        self._changed.set()

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
        self.roster.on_beat = self._beat
        self.roster.on_loss = self._lost
        await self.keeper.start([row.id for row in unfinished if row.status != Status.VALIDATING])
        await self.roster.start()
        self._ready = True
        self._work("heartbeats", self.roster.listen())
        self._work("ledger", self.keeper.run())
        self._work("purge", self.keeper.purge())
        self._work("jobs", self._steady("jobs", self._jobs))
        self._work("fleet", self._steady("fleet", self._fleet))
        self._work("leases", self._steady("leases", self.leases.run))
        self._work("versions", self._steady("versions", self.versions.run))
        self._work("events", self._steady("events", self._events))
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

    async def _steady(self, name: str, work: Any) -> None:
        """Run `work` for ever; what may be over at the next try is tried again."""
        while True:
            try:
                await work()
            except Fenced:
                await self._still_leading()
            except TRANSIENT as error:
                log.warning("coordinator.retrying", task=name, error=repr(error))
                await asyncio.sleep(0.5)

    async def _still_leading(self) -> None:
        """After a refusal: go on if it was for an epoch of this coordinator's own past. Raises Fenced."""
        await self.leadership.check()
        await asyncio.sleep(0.1)

    # --- jobs ---------------------------------------------------------------------------------------------------------

    async def _jobs(self) -> None:
        """Take up jobs that are new, and tell the runs of those that changed."""
        while True:
            unfinished = await jobs.unfinished(self.sessions)
            self.leases.coming = {row.id for row in unfinished if row.id not in self.runs}
            for row in unfinished:
                if row.id not in self.runs and row.id not in self._preparing:
                    self._preparing.add(row.id)
                    self._work(f"prepare {row.id}", self._take_up(row), may_end=True)
            for run in list(self.runs.values()):
                if not run.closed and run.scope.status not in TERMINAL:
                    await self._reread(run)
                    run.scope.woken.set()
            self._changed.clear()
            try:
                async with asyncio.timeout(1.0):
                    await self._changed.wait()
            except TimeoutError:
                pass

    async def _reread(self, run: Run) -> None:
        """Read the row of a run again; a job that was deleted has nothing left to run."""
        try:
            await run.refresh()
        except NotFound:
            run.closed = True
            run.scope.woken.set()

    async def _take_up(self, row: Job) -> None:
        try:
            prepared = await self._prepared(row)
            if prepared is None:
                return
            scope = Scope(
                row,
                prepared,
                keeper=self.keeper,
                roster=self.roster,
                nats=self.nats,
                sessions=self.sessions,
                clock=self.clock,
            )
            run = Run(scope)
            await run.start()
            self.runs[row.id] = run
            self._work(f"run {row.id}", self._drive(run), may_end=True)
            self.batches.queued.set()
        except (Conflict, NotFound) as change:
            log.info("job.changed", job=row.id, change=str(change))  # a user was faster; the row says what it is now
        except Fenced:
            await self._still_leading()
        except TRANSIENT as error:
            if isinstance(error, DiskFull):
                full = obstacles.obstacle("CoordinatorDiskFull", str(error))
                self._spawn(self._tell(row.id, full))
            log.warning("job.take_up_failed", job=row.id, error=repr(error))
            await asyncio.sleep(0.5)
        finally:
            self._preparing.discard(row.id)

    async def _tell(self, job: str, held_up: obstacles.Obstacle) -> None:
        """Show what a job that does not run yet waits for."""
        try:
            await jobs.describe(
                self.sessions,
                job,
                reason=held_up.reason,
                message=held_up.message,
                now=self.clock.time(),
                epoch=self.epoch,
            )
        except (NotFound, Fenced, *TRANSIENT) as error:
            log.warning("job.untold", job=job, reason=held_up.reason, error=repr(error))

    async def _prepared(self, row: Job) -> Prepared | None:
        """Check the inputs of a job, or open again what was checked; a job with wrong ones fails."""
        spec = JobSpec.model_validate(row.spec)
        data_dir = self.settings.data_dir.absolute()
        shown = 0

        def progress(rows: int) -> None:
            nonlocal shown
            if rows >= shown + 50_000:
                shown = rows
                log.info("job.tokenising", job=row.id, rows=rows)

        try:
            if row.status != Status.VALIDATING:
                return await reopen(spec, row.dataset, roots=self.roots, data_dir=data_dir)
            if spec.rollout.engine == "stub":
                parse_options(spec.rollout.stub)
            prepared = await prepare(spec, roots=self.roots, data_dir=data_dir, progress=progress)
        except DataError as error:
            await jobs.move(self.sessions, row.id, Move.FAIL, now=self.clock.time(), error=str(error), epoch=self.epoch)
            await self._event(row.id, "error", "job.failed", str(error))
            return None
        await jobs.record_dataset(self.sessions, row.id, prepared.report, epoch=self.epoch)
        fresh = await jobs.get(self.sessions, row.id)
        if fresh.status == Status.VALIDATING:
            await jobs.move(self.sessions, row.id, Move.VALIDATED, now=self.clock.time(), epoch=self.epoch)
            kept = prepared.report["kept"]
            await self._event(row.id, "info", "job.validated", f"The dataset has {kept} prompts.", prepared.report)
        elif fresh.status in TERMINAL:
            return None
        return prepared

    async def _refuse(self, row: Job, error: str) -> None:
        await jobs.move(self.sessions, row.id, Move.FAIL, now=self.clock.time(), error=error, epoch=self.epoch)
        await self._event(row.id, "error", "job.failed", error)

    async def _drive(self, run: Run) -> None:
        while not run.closed:
            try:
                async with asyncio.timeout(ROUND_S):
                    await run.scope.woken.wait()
            except TimeoutError:
                pass
            run.scope.woken.clear()
            try:
                await run.tick()
            except (Conflict, NotFound) as change:
                log.info("job.changed", job=run.id, change=str(change))
                await self._reread(run)
            except Fenced:
                await self._still_leading()
            except TRANSIENT as error:
                log.warning("run.retrying", job=run.id, error=repr(error))
                run.obstacle = obstacles.of_database(error) if isinstance(error, DBAPIError) else None
                run.doubtful = True
                await asyncio.sleep(0.25)
            else:
                run.obstacle = None
        for _ in range(100):
            if run.id not in self.keeper.books or run.scope.book.ended:
                break
            await asyncio.sleep(0.1)
        await self.keeper.close_job(run.id)
        self.runs.pop(run.id, None)
        self.batches.queued.set()

    async def _event(
        self, job: str, level: str, kind: str, message: str, data: Mapping[str, Any] | None = None
    ) -> None:
        item = events.NewEvent(
            id=new_id("evt"),
            job=job,
            level=level,
            type=kind,
            message=message,
            at=self.clock.time(),
            source="coordinator",
            data=dict(data or {}),
        )
        await events.append(self.sessions, [item])

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

    # --- fleet --------------------------------------------------------------------------------------------------------

    async def _fleet(self) -> None:
        while True:
            await self.roster.tick()
            await self.batches.expire()
            await asyncio.sleep(self.settings.heartbeat_s / 2)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        self.supervisor.spawn("message", coroutine, may_end=True)

    # --- events -------------------------------------------------------------------------------------------------------

    async def _events(self) -> None:
        """Keep in SQL what other services say of jobs."""
        js = self.nats.jetstream(timeout=3)
        subscription = await js.pull_subscribe(subject("events", "*", "*"), durable="coordinator", stream=EVENTS)
        while True:
            try:
                messages = await subscription.fetch(64, timeout=0.5)
            except TimeoutError:
                continue
            except APIError as error:
                log.warning("events.resubscribing", error=repr(error))
                await asyncio.sleep(0.5)
                return
            fresh = []
            for message in messages:
                _, job, source = parse_subject(message.subject)
                try:
                    event = events_pb2.Event.FromString(message.data)
                    fresh.append(events.NewEvent.from_message(event, job=job, source=source))
                except (CorruptData, DecodeError) as error:
                    self.corrupt_events += 1
                    log.warning("events.corrupt", subject=message.subject, error=str(error))
            await events.append(self.sessions, fresh)
            for message in messages:
                await message.ack()
