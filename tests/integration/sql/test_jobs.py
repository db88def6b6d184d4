"""Jobs in SQL: one key one job, moves that never tear, claims that never hand out one job twice."""

from __future__ import annotations

import asyncio

import pytest
from rlharvest.errors import Conflict, Fenced, NotFound
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import Move, Status
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import events, jobs
from rlharvest_coordinator.store.events import NewEvent
from rlharvest_coordinator.tables import Leader


def _other(spec: JobSpec) -> JobSpec:
    return spec.model_copy(update={"seed": spec.seed + 1})


async def test_a_key_makes_one_job_however_many_ask_at_once(sessions: Sessions, spec: JobSpec) -> None:
    made = await asyncio.gather(*(jobs.create(sessions, spec, key="k", now=1.0) for _ in range(20)))
    assert len({job.id for job, _ in made}) == 1
    assert sum(new for _, new in made) == 1
    with pytest.raises(Conflict, match=made[0][0].id):
        await jobs.create(sessions, _other(spec), key="k", now=2.0)


async def test_without_a_key_each_call_makes_a_job(sessions: Sessions, spec: JobSpec) -> None:
    first, _ = await jobs.create(sessions, spec, key=None, now=1.0)
    second, new = await jobs.create(sessions, spec, key=None, now=1.0)
    assert new
    assert first.id != second.id


async def test_listing_goes_from_new_to_old_without_gaps(sessions: Sessions, spec: JobSpec) -> None:
    ids = [(await jobs.create(sessions, spec, key=None, now=float(at // 2)))[0].id for at in range(7)]
    seen: list[str] = []
    after = None
    while True:
        part = await jobs.listing(sessions, limit=3, after=after)
        seen += [job.id for job in part.rows]
        if not part.has_more:
            break
        after = seen[-1]
    assert sorted(seen) == sorted(ids)
    assert len(seen) == len(ids)
    created = [(await jobs.get(sessions, job)).created_at for job in seen]
    assert created == sorted(created, reverse=True)
    with pytest.raises(NotFound):
        await jobs.listing(sessions, limit=3, after="rljob_none")


async def test_moves_set_reason_and_times(sessions: Sessions, spec: JobSpec) -> None:
    job, _ = await jobs.create(sessions, spec, key=None, now=1.0)
    await jobs.move(sessions, job.id, Move.VALIDATED, now=2.0)
    claimed = await jobs.claim(sessions, trainer="t", now=3.0)
    assert claimed is not None
    assert (claimed.status, claimed.fence, claimed.started_at) == (Status.RUNNING, 1, 3.0)
    pausing = await jobs.move(sessions, job.id, Move.PAUSE, now=4.0)
    again = await jobs.move(sessions, job.id, Move.PAUSE, now=5.0)
    assert (pausing.reason, again.since) == ("Pausing", 4.0)
    paused = await jobs.move(sessions, job.id, Move.PAUSED, now=6.0)
    assert paused.trainer is None
    ended = await jobs.move(sessions, job.id, Move.CANCEL, now=7.0, message="Because.\0")
    assert (ended.status, ended.finished_at, ended.message) == (
        Status.CANCELLED,
        7.0,
        "Because.\N{REPLACEMENT CHARACTER}",
    )
    with pytest.raises(Conflict):
        await jobs.move(sessions, job.id, Move.RESUME, now=8.0)


async def test_changes_at_the_same_time_are_all_decided_on_the_newest_row(sessions: Sessions, spec: JobSpec) -> None:
    job, _ = await jobs.create(sessions, spec, key=None, now=1.0)
    await asyncio.gather(
        *(jobs.record_counters(sessions, job.id, {f"c{n}": n}) for n in range(8)),
        jobs.move(sessions, job.id, Move.VALIDATED, now=2.0),
    )
    row = await jobs.get(sessions, job.id)
    assert row.counters == {f"c{n}": n for n in range(8)}
    assert row.status == Status.QUEUED


async def test_claims_go_oldest_first_and_each_job_to_one_trainer(sessions: Sessions, spec: JobSpec) -> None:
    ids = []
    for at in range(3):
        job, _ = await jobs.create(sessions, spec, key=None, now=float(at))
        await jobs.move(sessions, job.id, Move.VALIDATED, now=10.0)
        ids.append(job.id)
    assert await jobs.place(sessions, await jobs.get(sessions, ids[2])) == 2
    claimed = await asyncio.gather(*(jobs.claim(sessions, trainer=f"t{n}", now=20.0) for n in range(4)))
    given = [job.id for job in claimed if job is not None]
    assert sorted(given) == sorted(ids)
    owner = next(job for job in claimed if job is not None)
    assert owner.trainer is not None
    again = await jobs.claim(sessions, trainer=owner.trainer, now=30.0)
    assert again is not None
    assert (again.id, again.fence) == (owner.id, owner.fence + 1)


async def test_only_an_ended_job_is_deleted_and_leaves_a_tombstone(sessions: Sessions, spec: JobSpec) -> None:
    job, _ = await jobs.create(sessions, spec, key="k", now=1.0)
    with pytest.raises(Conflict, match="cancel it first"):
        await jobs.remove(sessions, job.id)
    await jobs.move(sessions, job.id, Move.CANCEL, now=2.0)
    event = NewEvent(id="evt_1", job=job.id, level="info", type="t", message="m", at=1.0, source="s")
    assert await events.append(sessions, [event]) == 1
    await jobs.remove(sessions, job.id)
    with pytest.raises(NotFound):
        await jobs.get(sessions, job.id)
    assert await events.append(sessions, [event]) == 0, "late events of a deleted job are ignored"
    _, new = await jobs.create(sessions, spec, key="k", now=3.0)
    assert new


async def test_a_replaced_leader_writes_nothing(sessions: Sessions, spec: JobSpec) -> None:
    job, _ = await jobs.create(sessions, spec, key=None, now=1.0, epoch=1)
    async with sessions.begin() as session:
        session.add(Leader(id=1, epoch=2, holder="other", beat=0))
    with pytest.raises(Fenced):
        await jobs.move(sessions, job.id, Move.CANCEL, now=2.0, epoch=1)
    assert (await jobs.get(sessions, job.id)).status == Status.VALIDATING
    await jobs.move(sessions, job.id, Move.CANCEL, now=2.0, epoch=2)
