"""Optimizer steps and their metrics in SQL.

Invariants: a step is recorded once, whatever is reported twice; only a newer fence (a trainer that replays after a
crash) replaces a step, and job.step and job.version follow the newest report. The same claim may give the step that it
is at a newer version: the weight service lost the one before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rlharvest.errors import Fenced, NotFound
from sqlalchemy import select

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import fence as leadership
from rlharvest_coordinator.store.values import finite
from rlharvest_coordinator.tables import Job, Step


@dataclass(frozen=True, slots=True)
class Curves:
    """Metrics by step; every series is as long as `steps`, with None where a step has no such metric."""

    steps: list[int]
    series: dict[str, list[float | None]]


async def record(
    sessions: Sessions,
    job: str,
    step: int,
    *,
    version: int,
    digest: str,
    fence: int,
    metrics: Mapping[str, float],
    now: float,
    epoch: int | None = None,
) -> bool:
    """Keep a step and put the job at it; return False if it was known.

    Raises:
        Fenced: a newer claim of the job exists.
        NotFound: there is no such job.
    """
    async with sessions.begin() as session:
        await leadership.require(session, epoch)
        row = await session.get(Job, job, with_for_update=True)
        if row is None or row.deleted:
            raise NotFound(f"there is no job {job!r}")
        if fence < row.fence:
            raise Fenced(f"claim {fence} of job {job} is over; claim {row.fence} has it")
        known = await session.get(Step, (job, step))
        if known is not None and known.fence == fence and step == row.step and version > known.version:
            known.version, known.digest = version, digest
            row.version = version
            return True
        if known is not None and known.fence >= fence:
            return False
        if known is None:
            known = Step(job=job, step=step)
            session.add(known)
        known.version, known.digest, known.fence = version, digest, fence
        known.metrics, known.at = finite(dict(metrics)), now
        row.step, row.version = step, version
        return True


async def curves(
    sessions: Sessions,
    job: str,
    *,
    names: Sequence[str] | None = None,
    from_step: int = 0,
    max_points: int | None = None,
) -> Curves:
    """Return metrics by step, thinned out to `max_points` steps, of which the first and the last are always there."""
    query = select(Step.step, Step.metrics).where(Step.job == job, Step.step >= from_step).order_by(Step.step)
    async with sessions() as session:
        rows = (await session.execute(query)).all()
    rows = [rows[index] for index in thin(len(rows), max_points)]
    wanted = list(names) if names is not None else sorted({name for _, metrics in rows for name in metrics})
    return Curves(
        steps=[step for step, _ in rows],
        series={name: [metrics.get(name) for _, metrics in rows] for name in wanted},
    )


def thin(n: int, most: int | None) -> list[int]:
    """Return at most `most` of the indices 0 … n-1, evenly spread, with both ends (for `most` 1: the last)."""
    if most is None or n <= most:
        return list(range(n))
    if most == 1:
        return [n - 1]
    return [round(index * (n - 1) / (most - 1)) for index in range(most)]
