"""Finished responses in SQL, read with what their group became."""

from __future__ import annotations

from dataclasses import dataclass

from rlharvest.errors import NotFound
from rlharvest.ids import parse_response_id
from sqlalchemy import select
from sqlalchemy.orm import defer

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store.page import Page, page
from rlharvest_coordinator.tables import Group, Sample


@dataclass(frozen=True, slots=True)
class Found:
    """A sample and its group, which may not be accepted yet."""

    sample: Sample
    group: Group | None


async def listing(
    sessions: Sessions,
    job: str,
    *,
    limit: int,
    after: str | None = None,
    step: int | None = None,
    min_reward: float | None = None,
) -> Page[Found]:
    """Return the samples of a job without tokens, newest response first, from behind the response `after`.

    Args:
        step: only those of the batch that this optimizer step used.
        min_reward: only those with at least this reward.

    Raises:
        NotFound: `after` is no response of this job.
    """
    query = (
        select(Sample, Group)
        .outerjoin(Group, (Group.job == Sample.job) & (Group.ordinal == Sample.group))
        .where(Sample.job == job)
        .order_by(Sample.handle.desc())
        .options(defer(Sample.ids, raiseload=True), defer(Sample.logprobs, raiseload=True))
    )
    if after is not None:
        query = query.where(Sample.handle < _handle(job, after))
    if step is not None:
        query = query.where(Group.step == step)
    if min_reward is not None:
        query = query.where(Sample.reward >= min_reward)
    async with sessions() as session:
        rows = (await session.execute(query.limit(limit + 1))).all()
    return page([Found(sample, group) for sample, group in rows], limit)


async def get(sessions: Sessions, job: str, response: str) -> Found | None:
    """Return a sample with its tokens, or None if SQL has it not. Raises NotFound: no response of this job."""
    key = (job, _handle(job, response))
    async with sessions() as session:
        sample = await session.get(Sample, key)
        return Found(sample, await session.get(Group, (job, sample.group))) if sample is not None else None


def _handle(job: str, response: str) -> int:
    try:
        owner, handle = parse_response_id(response)
    except ValueError as error:
        raise NotFound(str(error)) from error
    if owner != job or handle >= 2**32:
        raise NotFound(f"{response!r} is no response of job {job}")
    return handle
