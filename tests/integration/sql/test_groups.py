"""What SQL says of a job's groups, from their completion to their end."""

from __future__ import annotations

from rlharvest.jobs.model import JobSpec
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import groups, jobs
from rlharvest_coordinator.tables import Group


async def test_what_no_checkpoint_covers_is_dropped_when_the_job_is_over(sessions: Sessions, spec: JobSpec) -> None:
    """Also what is in a batch that nobody will train: else a cancelled job has responses outstanding for ever."""
    job, other = [(await jobs.create(sessions, spec, key=None, now=1.0))[0].id for _ in range(2)]
    states = [groups.TRAINED, groups.COMMITTED, groups.ACCEPTED, groups.DROPPED]
    for owner in (job, other):
        for ordinal, state in enumerate(states):
            row = Group(
                job=owner, ordinal=ordinal, state=state, prompt=0, data_epoch=0, tokens=3, masked=False, at=1.0,
                reason="early" if state == groups.DROPPED else None,
            )  # fmt: skip
            assert await groups.record(sessions, row, [], epoch=0)
    found = await groups.drop_rest(sessions, job, "cancelled", epoch=0)
    assert sorted(found) == [(1, groups.COMMITTED), (2, groups.ACCEPTED)]
    mine = [state async for _, state, _, _ in groups.all_of(sessions, job)]
    assert mine == [groups.TRAINED, groups.DROPPED, groups.DROPPED, groups.DROPPED]
    assert [state async for _, state, _, _ in groups.all_of(sessions, other)] == states
    assert await groups.drop_rest(sessions, job, "cancelled", epoch=0) == []
