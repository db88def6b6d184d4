"""Earlier responses to a prompt, as SQL keeps them: the samples of the groups of earlier epochs."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from sqlalchemy import select

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store.groups import DROPPED
from rlharvest_coordinator.tables import Group, Sample


@dataclass(frozen=True, slots=True)
class Past:
    """A response of an earlier epoch."""

    prompt: int
    """Row of the dataset."""
    epoch: int
    ids: bytes
    """Little-endian u32."""
    version: int
    """That sampled its last token."""
    reward: float


async def past(
    sessions: Sessions, job: str, prompts: Collection[int], *, first_epoch: int, below_epoch: int
) -> list[Past]:
    """Return the responses of a job to some rows of its dataset in some epochs, newest epoch first, best reward first."""
    query = (
        select(Group.prompt, Group.data_epoch, Sample.ids, Sample.runs, Sample.reward)
        .join(Sample, (Sample.job == Group.job) & (Sample.group == Group.ordinal))
        .where(
            Group.job == job,
            Group.prompt.in_(prompts),
            Group.data_epoch >= first_epoch,
            Group.data_epoch < below_epoch,
            Group.state != DROPPED,
        )
        .order_by(Group.data_epoch.desc(), Sample.reward.desc(), Sample.handle)
    )
    async with sessions() as session:
        rows = (await session.execute(query)).all()
    return [Past(prompt, epoch, ids, int(runs[-1][1]), reward) for prompt, epoch, ids, runs, reward in rows if ids]
