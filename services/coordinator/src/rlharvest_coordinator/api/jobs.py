"""Jobs as the API has them: one object behind REST, the OpenAI mapping and gRPC.

Invariants: only the leader changes anything; whatever changed in SQL is followed by `live.wake`, so that the part that
runs jobs looks at the row. A job is created in `validating`; validating it is that part's.
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import structlog
from rlharvest.clock import Clock, SystemClock
from rlharvest.errors import InvalidField, NotLeader
from rlharvest.ids import new_id
from rlharvest.jobs.model import parse
from rlharvest.jobs.state import Move, Status

from rlharvest_coordinator.api import audit
from rlharvest_coordinator.api.resources import DeletedJob, JobResource, ListOf, job_resource, listed
from rlharvest_coordinator.live import LiveJob, LiveView
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import checkpoints as stored
from rlharvest_coordinator.store import events, jobs
from rlharvest_coordinator.store.events import NewEvent
from rlharvest_coordinator.tables import Job

log = structlog.get_logger(__name__)

KEY_LENGTH = 255


class Jobs:
    """Create, read, and the verbs."""

    def __init__(
        self,
        sessions: Sessions,
        live: LiveView,
        clock: Clock | None = None,
        *,
        most: int = jobs.MOST_UNFINISHED,
        checkpoints: Path,
    ) -> None:
        """`most` jobs may be unfinished at a time; `checkpoints` is the directory of all jobs' checkpoints."""
        self.most = most
        self.checkpoints = checkpoints
        self.sessions = sessions
        self.live = live
        self.clock = clock or SystemClock()

    async def create(self, values: Any, key: str | None = None) -> tuple[JobResource, bool]:
        """Check and write a job; return it and whether it is new.

        Raises:
            InvalidField: the spec is wrong.
            Conflict: the key belongs to a job with another spec.
            LimitReached: too many jobs are unfinished.
            NotLeader: another coordinator leads.
        """
        spec = parse(values)
        if key is not None and not (0 < len(key) <= KEY_LENGTH and key.isprintable()):
            raise InvalidField("Idempotency-Key", key, "not a key", f"Use 1 to {KEY_LENGTH} printable characters.")
        epoch = self._epoch()
        row, new = await jobs.create(self.sessions, spec, key=key, now=self.clock.time(), most=self.most, epoch=epoch)
        audit.about(row.id)
        if new:
            log.info("job.created", job=row.id, name=spec.name)
            await self._tell(row, "job.created", "The job was created.")
        return await self._resource(row), new

    async def get(self, job: str) -> JobResource:
        """Return a job. Raises NotFound."""
        # The live view first: a job that closes in between has its totals in the row that is read after it.
        live = self.live.job(job)
        return await self._resource(await jobs.get(self.sessions, job), live)

    async def listing(self, *, limit: int, after: str | None, status: Status | None = None) -> ListOf[JobResource]:
        """Return jobs, newest first. Raises NotFound: there is no job `after`."""
        found = await jobs.listing(self.sessions, limit=limit, after=after, status=status)
        latest = await stored.latest_of(self.sessions, [row.id for row in found.rows])
        shown = [
            job_resource(
                row,
                self.live.job(row.id),
                checkpoint=latest.get(row.id),
                position=await jobs.place(self.sessions, row),
            )
            for row in found.rows
        ]
        return listed(shown, found.has_more)

    async def cancel(self, job: str) -> JobResource:
        """End a job. Raises Conflict, NotFound, NotLeader."""
        return await self._move(job, Move.CANCEL)

    async def pause(self, job: str) -> JobResource:
        """Pause a job. Raises Conflict, NotFound, NotLeader."""
        return await self._move(job, Move.PAUSE)

    async def resume(self, job: str) -> JobResource:
        """Go on with a paused job. Raises Conflict, NotFound, NotLeader."""
        return await self._move(job, Move.RESUME)

    async def delete(self, job: str, *, checkpoints: bool = False) -> DeletedJob:
        """Delete an ended job with its records and its versions, and with `checkpoints` the files of its checkpoints.

        Raises:
            Conflict: it has not ended.
            NotFound, NotLeader: as ever.
        """
        saved = await stored.latest(self.sessions, job) is not None
        await jobs.remove(self.sessions, job, epoch=self._epoch())
        log.info("job.deleted", job=job, checkpoints=checkpoints)
        self.live.wake(job)
        directory = self.checkpoints / job
        here = directory.exists()
        if checkpoints and here:
            await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        # What was saved and is not on this machine is on the trainer's, under the same path.
        left = directory.exists() or (saved and not here)
        return DeletedJob(id=job, checkpoints=str(directory) if left else None)

    async def drain(self, worker: str, reason: str) -> None:
        """Tell a worker to leave. Raises NotFound, NotLeader."""
        self._epoch()
        await self.live.drain(worker, reason)

    def _epoch(self) -> int:
        if not self.live.leading:
            raise NotLeader
        return self.live.epoch

    async def _move(self, job: str, move: Move) -> JobResource:
        row = await jobs.move(self.sessions, job, move, now=self.clock.time(), epoch=self._epoch())
        log.info("job.asked", job=job, move=move.value, status=row.status)
        await self._tell(row, "job.status", f"A user asked to {move.value}: the job is {row.status}.")
        return await self._resource(row)

    async def _tell(self, row: Job, kind: str, message: str) -> None:
        now = self.clock.time()
        event = NewEvent(
            id=new_id("evt", now=now),
            job=row.id,
            level="info",
            type=kind,
            message=message,
            at=now,
            source="api",
            data={"status": row.status},
        )
        await events.append(self.sessions, [event])
        self.live.wake(row.id)

    async def _resource(self, row: Job, live: LiveJob | None = None) -> JobResource:
        return job_resource(
            row,
            live or self.live.job(row.id),
            checkpoint=await stored.latest(self.sessions, row.id),
            position=await jobs.place(self.sessions, row),
        )
