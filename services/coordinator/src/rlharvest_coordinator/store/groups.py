"""Groups that left the ledger, in SQL: accepted, committed to a batch, trained, or dropped.

Invariants: a group is written once with all its samples, before the ledger forgets it; a committed group keeps its batch and
its place for ever (the database refuses a second group in a place); a batch is on record before any of it is delivered.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from sqlalchemy import func, select, update

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import fence
from rlharvest_coordinator.store.values import storable
from rlharvest_coordinator.tables import Group, Sample, Version

ACCEPTED, COMMITTED, TRAINED, DROPPED = "accepted", "committed", "trained", "dropped"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commitment:
    """A group's place in a batch."""

    ordinal: int
    step: int
    position: int
    staleness: int
    masked: bool


async def record(sessions: Sessions, group: Group, samples: Sequence[Sample], *, epoch: int) -> bool:
    """Write a group with its samples; return False if it was written before."""
    for sample in samples:
        sample.prompt_text, sample.text = storable(sample.prompt_text), storable(sample.text)
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        if await session.get(Group, (group.job, group.ordinal)) is not None:
            return False
        session.add(group)
        session.add_all(samples)
    return True


async def commit(sessions: Sessions, job: str, commitments: Sequence[Commitment], *, epoch: int) -> None:
    """Put accepted groups into batches."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        for item in commitments:
            await session.execute(
                update(Group)
                .where(Group.job == job, Group.ordinal == item.ordinal, Group.state == ACCEPTED)
                .values(
                    state=COMMITTED,
                    step=item.step,
                    position=item.position,
                    staleness=item.staleness,
                    masked=item.masked,
                )
            )


async def drop(sessions: Sessions, job: str, ordinals: Sequence[int], reason: str, *, epoch: int) -> None:
    """Take accepted groups out, untrained."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        await session.execute(
            update(Group)
            .where(Group.job == job, Group.ordinal.in_(ordinals), Group.state == ACCEPTED)
            .values(state=DROPPED, reason=reason)
        )


async def drop_rest(sessions: Sessions, job: str, reason: str, *, epoch: int) -> list[tuple[int, str]]:
    """Take out, untrained, every group that no checkpoint covers; return their ordinals and the states they were in."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        rest = list(
            await session.scalars(select(Group).where(Group.job == job, Group.state.in_((ACCEPTED, COMMITTED))))
        )
        before = [(group.ordinal, group.state) for group in rest]
        for group in rest:
            group.state, group.reason = DROPPED, reason
    return before


async def train(sessions: Sessions, job: str, *, below: int, epoch: int) -> list[Group]:
    """Note that a durable checkpoint covers the batches below a step; return the groups for which that is news."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        fresh = list(
            await session.scalars(select(Group).where(Group.job == job, Group.state == COMMITTED, Group.step < below))
        )
        for group in fresh:
            group.state = TRAINED
    return fresh


async def all_of(sessions: Sessions, job: str) -> AsyncIterator[tuple[int, str, int | None, int]]:
    """Yield (ordinal, state, batch, tokens) of every group of a job that left the ledger, in order of admission."""
    query = select(Group.ordinal, Group.state, Group.step, Group.tokens).where(Group.job == job).order_by(Group.ordinal)
    async with sessions() as session:
        async for row in await session.stream(query):
            yield row.ordinal, row.state, row.step, row.tokens


async def accepted(sessions: Sessions, job: str) -> list[Group]:
    """Return the groups of a job that are complete and in no batch, in order of admission."""
    query = select(Group).where(Group.job == job, Group.state == ACCEPTED).order_by(Group.ordinal)
    async with sessions() as session:
        return list(await session.scalars(query))


async def batch(sessions: Sessions, job: str, step: int, *, after: int, limit: int) -> list[tuple[Group, list[Sample]]]:
    """Return groups of a batch with their samples, from a position on, in order of commitment."""
    async with sessions() as session:
        groups = list(
            await session.scalars(
                select(Group)
                .where(Group.job == job, Group.step == step, Group.position >= after)
                .order_by(Group.position)
                .limit(limit)
            )
        )
        if not groups:
            return []
        ordinals = [group.ordinal for group in groups]
        samples = await session.scalars(
            select(Sample).where(Sample.job == job, Sample.group.in_(ordinals)).order_by(Sample.handle)
        )
        by_group: dict[int, list[Sample]] = {ordinal: [] for ordinal in ordinals}
        for sample in samples:
            by_group[sample.group].append(sample)
    return [(group, by_group[group.ordinal]) for group in groups]


async def counts(sessions: Sessions, job: str) -> dict[str, int]:
    """Return how many groups of a job are in each state."""
    async with sessions() as session:
        rows = await session.execute(select(Group.state, func.count()).where(Group.job == job).group_by(Group.state))
        return dict(rows.all())


async def record_version(
    sessions: Sessions, job: str, version: int, *, step: int, digest: str, now: float, epoch: int
) -> None:
    """Note which optimizer step a version stands for; a version never changes."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        if await session.get(Version, (job, version)) is None:
            session.add(Version(job=job, version=version, step=step, digest=digest, at=now))


async def versions(sessions: Sessions, job: str) -> dict[int, int]:
    """Return the optimizer step of every version of a job."""
    async with sessions() as session:
        rows = await session.execute(select(Version.version, Version.step).where(Version.job == job))
        return dict(rows.all())
