"""The runs of this coordinator: takes up the jobs that are under way, drives each, and lets it go when it is over.

Invariants: each job has at most one run; a job's inputs are checked before its first run and opened again for each later
one; what may be over at the next try is tried again, and shown as what the job waits for; nothing of a job that is over
is kept.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Protocol

import structlog
from nats.aio.client import Client
from rlharvest.clock import Clock
from rlharvest.errors import Conflict, DataError, DiskFull, Fenced, NotFound, Unavailable
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import TERMINAL, Move, Status
from rlharvest.testing.stub import parse_options
from sqlalchemy.exc import DBAPIError

from rlharvest_coordinator import obstacles
from rlharvest_coordinator.data.prepare import Prepared, prepare, reopen
from rlharvest_coordinator.journal import Journal
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.leader import Leadership
from rlharvest_coordinator.leases import Leases
from rlharvest_coordinator.obstacles import TRANSIENT
from rlharvest_coordinator.roster import Roster
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import jobs
from rlharvest_coordinator.tables import Job

log = structlog.get_logger(__name__)

ROUND_S = 0.25
"""A run looks at everything at least this often, besides whenever something happens."""

LOOK_S = 1.0
"""How often it is looked for jobs that are new or changed, besides whenever somebody says so."""


class Work(Protocol):
    """Starts a supervised task that may end."""

    def __call__(self, name: str, coroutine: Coroutine[Any, Any, None], *, may_end: bool = False) -> None: ...


class Runs:
    """Jobs under way.

    Args:
        runs: by job; others look at them.
        queued: set when a trainer may find a job to claim.
    """

    def __init__(
        self,
        runs: dict[str, Run],
        settings: CoordinatorSettings,
        nats: Client,
        sessions: Sessions,
        clock: Clock,
        *,
        keeper: Keeper,
        roster: Roster,
        leadership: Leadership,
        leases: Leases,
        journal: Journal,
        epoch: Callable[[], int],
        queued: asyncio.Event,
        work: Work,
    ) -> None:
        self.runs = runs
        self.settings = settings
        self.nats = nats
        self.sessions = sessions
        self.clock = clock
        self.keeper = keeper
        self.roster = roster
        self.leadership = leadership
        self.journal = journal
        self.leases = leases
        self.epoch = epoch
        self.queued = queued
        self.changed = asyncio.Event()
        """A job's row changed: look at it now."""
        self._roots = [root.absolute() for root in settings.roots]
        self._work = work
        self._preparing: set[str] = set()

    async def run(self) -> None:
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
            self.changed.clear()
            try:
                async with asyncio.timeout(LOOK_S):
                    await self.changed.wait()
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
            self.queued.set()
        except (Conflict, NotFound) as change:
            log.info("job.changed", job=row.id, change=str(change))  # a user was faster; the row says what it is now
        except Fenced:
            await self.leadership.still()
        except TRANSIENT as error:
            if isinstance(error, DiskFull):
                full = obstacles.obstacle("CoordinatorDiskFull", str(error))
                self._work("message", self._tell(row.id, full), may_end=True)
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
                epoch=self.epoch(),
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
                return await reopen(spec, row.dataset, roots=self._roots, data_dir=data_dir)
            if spec.rollout.engine == "stub":
                parse_options(spec.rollout.stub)
            prepared = await prepare(spec, roots=self._roots, data_dir=data_dir, progress=progress)
        except DataError as error:
            await jobs.move(
                self.sessions, row.id, Move.FAIL, now=self.clock.time(), error=str(error), epoch=self.epoch()
            )
            await self.journal.write(row.id, "error", "job.failed", str(error))
            return None
        await jobs.record_dataset(self.sessions, row.id, prepared.report, epoch=self.epoch())
        fresh = await jobs.get(self.sessions, row.id)
        if fresh.status == Status.VALIDATING:
            await jobs.move(self.sessions, row.id, Move.VALIDATED, now=self.clock.time(), epoch=self.epoch())
            kept = prepared.report["kept"]
            await self.journal.write(
                row.id, "info", "job.validated", f"The dataset has {kept} prompts.", prepared.report
            )
        elif fresh.status in TERMINAL:
            return None
        return prepared

    async def _drive(self, run: Run) -> None:
        try:
            await self._rounds(run)
        finally:
            over = f"The job is {run.scope.status}" if run.closed else "This coordinator stops"
            run.serving.end(Unavailable(f"{over}; the completion ended early."))
        for _ in range(100):
            if run.id not in self.keeper.books or run.scope.book.ended:
                break
            await asyncio.sleep(0.1)
        await self.keeper.close_job(run.id)
        self.runs.pop(run.id, None)
        self.queued.set()

    async def _rounds(self, run: Run) -> None:
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
                await self.leadership.still()
            except TRANSIENT as error:
                log.warning("run.retrying", job=run.id, error=repr(error))
                run.obstacle = obstacles.of_database(error) if isinstance(error, DBAPIError) else None
                run.doubtful = True
                await asyncio.sleep(0.25)
            else:
                run.obstacle = None
