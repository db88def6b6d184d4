"""Jobs in SQL.

Invariants: a status changes only through jobs.state.advance; a row changes only if nobody changed it since it was read
(resource_version), else the change is decided again on the new row; one key makes one job.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlharvest.errors import Conflict, LimitReached, NotFound, Unavailable
from rlharvest.ids import new_id
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import TERMINAL, Move, Status, advance
from sqlalchemy import Select, and_, delete, func, or_, select
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm.exc import StaleDataError

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import fence
from rlharvest_coordinator.store.page import Page, page
from rlharvest_coordinator.store.values import finite, storable
from rlharvest_coordinator.tables import CheckpointRow, Event, Group, Job, Sample, Step, Version

_TRIES = 20
"""Attempts at a row that others keep changing."""

DELETED, FORGOTTEN = "Deleted", "Forgotten"
"""Reasons of tombstones: with versions in the weight service, and without."""

MOST_UNFINISHED = 1000

_OWNED = (Status.RUNNING, Status.PAUSING, Status.CANCELLING)
"""Statuses in which a trainer may have the job."""

REASONS: dict[Status, tuple[str, str]] = {
    Status.VALIDATING: ("Validating", "Model, dataset and rewards are being checked."),
    Status.QUEUED: ("WaitingForTrainer", "Waits for a trainer."),
    Status.RUNNING: ("Starting", "A trainer has taken it."),
    Status.PAUSING: ("Pausing", "Responses are handed back and the trainer saves a checkpoint."),
    Status.PAUSED: ("Paused", "Paused; resume goes on where it stopped."),
    Status.CANCELLING: ("Cancelling", "Trainer and workers let go."),
    Status.SUCCEEDED: ("Succeeded", "All steps are done."),
    Status.FAILED: ("Failed", "It cannot go on."),
    Status.CANCELLED: ("Cancelled", "Ended by a user."),
}
"""Reason and message of a job that has just come to a status."""


async def create(
    sessions: Sessions,
    spec: JobSpec,
    *,
    key: str | None,
    now: float,
    most: int = MOST_UNFINISHED,
    epoch: int | None = None,
) -> tuple[Job, bool]:
    """Write a job in `validating`; return it and whether it is new. The same key and spec give the same job again.

    Args:
        most: jobs that may be unfinished at a time.

    Raises:
        Conflict: the key belongs to a job with another spec.
        LimitReached: too many jobs are unfinished.
    """
    digest = spec.digest()
    reason, message = REASONS[Status.VALIDATING]
    job = Job(
        id=new_id("rljob", now=now),
        status=Status.VALIDATING.value,
        reason=reason,
        message=message,
        since=now,
        spec=spec.model_dump(mode="json"),
        spec_digest=digest,
        idempotency_key=key,
        created_at=now,
    )
    if key is not None and (known := await _by_key(sessions, key)) is not None:
        return _same(known, digest), False
    try:
        async with sessions.begin() as session:
            await fence.require(session, epoch)
            unended = [status.value for status in Status if status not in TERMINAL]
            query = select(func.count()).where(Job.deleted.is_(False), Job.status.in_(unended))
            if (await session.scalar(query) or 0) >= most:
                raise LimitReached(
                    "unfinished jobs", most, "Wait for one to end, cancel one, or set RLHARVEST_MOST_JOBS."
                )
            session.add(job)
    except IntegrityError:
        known = await _by_key(sessions, key) if key is not None else None
        if known is None:
            raise
        return _same(known, digest), False
    return job, True


async def get(sessions: Sessions, job: str) -> Job:
    """Return a job. Raises NotFound."""
    async with sessions() as session:
        return await _get(session, job)


async def listing(
    sessions: Sessions, *, limit: int, after: str | None = None, status: Status | None = None
) -> Page[Job]:
    """Return jobs, newest first, from the one behind `after`. Raises NotFound: there is no job `after`."""
    async with sessions() as session:
        query = select(Job).where(Job.deleted.is_(False)).order_by(Job.created_at.desc(), Job.id.desc())
        if after is not None:
            last = await session.get(Job, after)
            if last is None:
                raise NotFound(f"there is no job {after!r} to list behind")
            query = query.where(
                or_(Job.created_at < last.created_at, and_(Job.created_at == last.created_at, Job.id < last.id))
            )
        if status is not None:
            query = query.where(Job.status == status.value)
        return page((await session.scalars(query.limit(limit + 1))).all(), limit)


async def unfinished(sessions: Sessions) -> list[Job]:
    """Return the jobs that are not over, oldest first: what a new leader takes up."""
    async with sessions() as session:
        return list(await session.scalars(_oldest_first(*(status for status in Status if status not in TERMINAL))))


async def place(sessions: Sessions, job: Job) -> int | None:
    """Return how many queued jobs come before a queued one, or None if it is not queued."""
    if job.status != Status.QUEUED:
        return None
    before = or_(Job.created_at < job.created_at, and_(Job.created_at == job.created_at, Job.id < job.id))
    query = select(func.count()).where(Job.deleted.is_(False), Job.status == Status.QUEUED.value, before)
    async with sessions() as session:
        return await session.scalar(query)


async def move(
    sessions: Sessions,
    job: str,
    what: Move,
    *,
    now: float,
    reason: str | None = None,
    message: str | None = None,
    error: str | None = None,
    epoch: int | None = None,
) -> Job:
    """Take a job through a move of its life; return it as it is then.

    Args:
        reason, message: why; unset: those of the new status.
        error: what a failed job shows.

    Raises:
        Conflict: the status does not allow it.
        NotFound: there is no such job.
    """

    def change(row: Job) -> None:
        before = Status(row.status)
        after = advance(before, what)
        known = REASONS[after]
        if after is not before or reason is not None or message is not None:
            row.reason = reason or known[0]
            row.message = storable(message or known[1])
            row.since = now
        row.status = after.value
        if error is not None:
            row.error = storable(error)
        if after in TERMINAL and row.finished_at is None:
            row.finished_at = now
        if after not in _OWNED:
            row.trainer = None

    return await update(sessions, job, change, epoch=epoch)


async def describe(
    sessions: Sessions, job: str, *, reason: str, message: str, now: float, epoch: int | None = None
) -> Job:
    """Say why a job is where it is; the same words again change nothing."""

    def change(row: Job) -> None:
        if (row.reason, row.message) != (reason, message):
            row.reason, row.message, row.since = reason, storable(message), now

    return await update(sessions, job, change, epoch=epoch)


async def update(sessions: Sessions, job: str, change: Callable[[Job], None], *, epoch: int | None = None) -> Job:
    """Apply `change` to the row, again on the newer row if somebody was faster; return the row.

    Raises:
        NotFound: there is no such job.
        Unavailable: others changed it all the time.
    """
    for _ in range(_TRIES):
        try:
            async with sessions.begin() as session:
                await fence.require(session, epoch)
                row = await _get(session, job)
                change(row)
            return row
        except StaleDataError:
            continue
    raise Unavailable(f"job {job} changes too fast to be changed; try again")


async def claim(sessions: Sessions, *, trainer: str, now: float, epoch: int | None = None) -> Job | None:
    """Give a trainer a job: the one it had or one whose trainer is lost, else the oldest queued one; None if there is none.

    The fence rises each time, so that an older instance of the trainer is refused from then on.
    """
    for _ in range(_TRIES):
        try:
            async with sessions.begin() as session:
                await fence.require(session, epoch)
                own = _oldest_first(*_OWNED).where(or_(Job.trainer == trainer, Job.trainer.is_(None))).limit(1)
                row = await session.scalar(own) or await session.scalar(_oldest_first(Status.QUEUED).limit(1))
                if row is None:
                    return None
                if row.status != Status.CANCELLING:
                    before = Status(row.status)
                    row.status = advance(before, Move.CLAIM).value
                    if row.status != before:
                        row.reason, row.message = REASONS[Status(row.status)]
                        row.since = now
                row.trainer = trainer
                row.fence += 1
                row.started_at = now if row.started_at is None else row.started_at
            return row
        except StaleDataError:
            continue
    raise Unavailable("the queue changes too fast to claim from; try again")


async def record_dataset(sessions: Sessions, job: str, report: dict[str, Any], *, epoch: int | None = None) -> Job:
    """Keep what validation found in the dataset."""

    def change(row: Job) -> None:
        row.dataset = finite(report)

    return await update(sessions, job, change, epoch=epoch)


async def record_counters(sessions: Sessions, job: str, counters: dict[str, int], *, epoch: int | None = None) -> Job:
    """Keep totals, so that they outlive the ledger."""

    def change(row: Job) -> None:
        row.counters = {**row.counters, **counters}

    return await update(sessions, job, change, epoch=epoch)


async def remove(sessions: Sessions, job: str, *, epoch: int | None = None) -> None:
    """Delete an ended job and all its rows; its own stays as a tombstone, so that late messages are ignored.

    Raises:
        Conflict: it has not ended.
        NotFound: there is no such job.
    """

    def change(row: Job) -> None:
        if Status(row.status) not in TERMINAL:
            raise Conflict(f"job {job} is {row.status}; cancel it first, then delete it")
        row.deleted = True
        row.idempotency_key = None
        row.reason, row.message = DELETED, "Its versions are still to be deleted."

    await update(sessions, job, change, epoch=epoch)
    async with sessions.begin() as session:
        for table in (Event, Step, Version, CheckpointRow, Sample, Group):
            await session.execute(delete(table).where(table.job == job))


async def unforgotten(sessions: Sessions) -> list[str]:
    """Return the deleted jobs whose versions may still be in the weight service, at most 100."""
    query = select(Job.id).where(Job.deleted.is_(True), Job.reason == DELETED).order_by(Job.created_at).limit(100)
    async with sessions() as session:
        return list(await session.scalars(query))


async def forgotten(sessions: Sessions, job: str, *, epoch: int | None = None) -> None:
    """Note that a deleted job has no versions any more."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        row = await session.get(Job, job)
        if row is not None and row.deleted:
            row.reason, row.message = FORGOTTEN, "Only its id is left."


async def _get(session: AsyncSession, job: str) -> Job:
    row = await session.get(Job, job)
    if row is None or row.deleted:
        raise NotFound(f"there is no job {job!r}")
    return row


async def _by_key(sessions: Sessions, key: str) -> Job | None:
    async with sessions() as session:
        found: Job | None = await session.scalar(select(Job).where(Job.idempotency_key == key))
        return found


def _same(job: Job, digest: str) -> Job:
    if job.spec_digest != digest:
        raise Conflict(f"this Idempotency-Key made job {job.id} out of another spec; use a new key for a new job")
    return job


def _oldest_first(*statuses: Status) -> Select[Job]:
    return (
        select(Job)
        .where(Job.deleted.is_(False), Job.status.in_([status.value for status in statuses]))
        .order_by(Job.created_at, Job.id)
    )
