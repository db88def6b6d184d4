"""Checkpoints in SQL. One a step: reporting it again changes nothing."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rlharvest.errors import NotFound
from rlharvest.ids import new_id
from sqlalchemy import delete, select
from sqlalchemy.exc import IntegrityError

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import fence
from rlharvest_coordinator.store.page import Page, page
from rlharvest_coordinator.store.values import finite
from rlharvest_coordinator.tables import CheckpointRow


async def record(
    sessions: Sessions,
    job: str,
    step: int,
    *,
    version: int,
    path: str,
    digest: str,
    metrics: Mapping[str, float],
    now: float,
    epoch: int | None = None,
) -> CheckpointRow:
    """Keep a checkpoint; return it, or the one that this step has already, brought up to date."""
    values = {"version": version, "path": path, "digest": digest, "metrics": finite(dict(metrics)), "at": now}
    try:
        async with sessions.begin() as session:
            await fence.require(session, epoch)
            query = select(CheckpointRow).where(CheckpointRow.job == job, CheckpointRow.step == step)
            row = await session.scalar(query)
            if row is None:
                row = CheckpointRow(id=new_id("ckpt", now=now), job=job, step=step, **values)
                session.add(row)
            elif row.digest != digest or row.path != path:
                for name, value in values.items():
                    setattr(row, name, value)
        return row
    except IntegrityError:
        known = await at_step(sessions, job, step)
        if known is None:
            raise
        return known


async def at_step(sessions: Sessions, job: str, step: int) -> CheckpointRow | None:
    """Return the checkpoint of a step."""
    query = select(CheckpointRow).where(CheckpointRow.job == job, CheckpointRow.step == step)
    async with sessions() as session:
        found: CheckpointRow | None = await session.scalar(query)
        return found


async def latest(sessions: Sessions, job: str) -> CheckpointRow | None:
    """Return the checkpoint with the most steps."""
    query = select(CheckpointRow).where(CheckpointRow.job == job).order_by(CheckpointRow.step.desc()).limit(1)
    async with sessions() as session:
        found: CheckpointRow | None = await session.scalar(query)
        return found


async def latest_of(sessions: Sessions, jobs: Collection[str]) -> dict[str, CheckpointRow]:
    """Return the checkpoint with the most steps of each of these jobs that has one."""
    query = select(CheckpointRow).where(CheckpointRow.job.in_(jobs)).order_by(CheckpointRow.step)
    async with sessions() as session:
        return {row.job: row for row in await session.scalars(query)}


async def listing(sessions: Sessions, job: str, *, limit: int, after: str | None = None) -> Page[CheckpointRow]:
    """Return the checkpoints of a job, newest first, from behind `after`. Raises NotFound: there is none such."""
    async with sessions() as session:
        query = select(CheckpointRow).where(CheckpointRow.job == job).order_by(CheckpointRow.step.desc())
        if after is not None:
            last = await session.get(CheckpointRow, after)
            if last is None or last.job != job:
                raise NotFound(f"job {job} has no checkpoint {after!r} to list behind")
            query = query.where(CheckpointRow.step < last.step)
        return page((await session.scalars(query.limit(limit + 1))).all(), limit)


async def forget(sessions: Sessions, job: str, steps: Collection[int], *, epoch: int | None = None) -> None:
    """Leave out checkpoints whose files are gone."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        where = (CheckpointRow.job == job, CheckpointRow.step.in_(steps))
        await session.execute(delete(CheckpointRow).where(*where))
