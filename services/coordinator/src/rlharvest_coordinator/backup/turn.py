"""What a restored database must forget, and the numbers it must never give out again.

A backup is some minutes or days old, and somebody may still act on what came after it: a trainer or worker that was
only cut off, a message on its way. Every number by which an older owner is refused therefore jumps past whatever can
have been used since.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from rlharvest.ids import new_id
from rlharvest.jobs.state import TERMINAL, Status
from sqlalchemy import select, update

from rlharvest_coordinator.leader import RELEASED
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import groups
from rlharvest_coordinator.tables import CheckpointRow, Event, Group, Job, Leader

LEAP = 1 << 20
"""Of epochs and claims. A coordinator that fails over every second uses fewer in twelve days."""


async def over(
    sessions: Sessions, *, checkpoints_dir: Path, restored: Mapping[str, set[int]], made_at: float, now: float
) -> list[str]:
    """Make rows of a backup fit what was restored with them; return the jobs that go on.

    Args:
        checkpoints_dir: where the checkpoints are now.
        restored: job -> steps of its restored checkpoints.
        made_at: when the backup was begun, seconds since 1970.
    """
    async with sessions.begin() as session:
        await session.execute(update(Leader).values(epoch=Leader.epoch + LEAP, holder=RELEASED))
        for row in await session.scalars(select(CheckpointRow)):
            if row.step in restored.get(row.job, ()):
                row.path = str(checkpoints_dir / row.job / f"step_{row.step}")
            else:
                await session.delete(row)
        going_on = []
        for job in await session.scalars(select(Job).where(Job.status.not_in([status.value for status in TERMINAL]))):
            job.fence += LEAP
            job.trainer = None
            job.version = None  # the weights of it are gone; its trainer publishes them again
            covered = max(restored.get(job.id, ()), default=0)
            await session.execute(
                update(Group)
                .where(Group.job == job.id, Group.state == groups.TRAINED, Group.step >= covered)
                .values(state=groups.COMMITTED)
            )
            if job.status != Status.VALIDATING:
                session.add(_event(job.id, covered, made_at, now))
            going_on.append(job.id)
    return going_on


def _event(job: str, step: int, made_at: float, now: float) -> Event:
    sentence = f"Restored from a backup that is {max(0.0, now - made_at) / 60:.0f} min old; goes on from step {step}."
    data = {"step": step, "made_at": made_at}
    return Event(
        id=new_id("evt"),
        job=job,
        level="warn",
        type="job.restored",
        message=sentence,
        data=data,
        at=now,
        source="restore",
    )
