"""Events, steps, checkpoints, samples and workers in SQL."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from rlharvest.errors import CorruptData, Fenced, NotFound
from rlharvest.ids import response_id
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import Move
from rlharvest.spans import ids_bytes
from rlharvest.v1 import events_pb2
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import checkpoints, events, groups, jobs, samples, steps, workers
from rlharvest_coordinator.store.events import NewEvent
from rlharvest_coordinator.tables import Group, Sample


@pytest.fixture
async def job(sessions: Sessions, spec: JobSpec) -> str:
    row, _ = await jobs.create(sessions, spec, key=None, now=1.0)
    await jobs.move(sessions, row.id, Move.VALIDATED, now=1.0)
    await jobs.claim(sessions, trainer="t", now=1.0)
    return row.id


def _event(job: str, n: int) -> NewEvent:
    data = {"n": n, "x": float("nan")}
    return NewEvent(
        id=f"evt_{n}", job=job, level="info", type="t", message=f"m{n}\0\ud800", at=n, source="s", data=data
    )


async def test_an_event_is_kept_once_and_read_in_order(sessions: Sessions, job: str) -> None:
    assert await events.append(sessions, [_event(job, 0), _event(job, 1)]) == 2
    assert await events.append(sessions, [_event(job, 1), _event(job, 2)]) == 1
    found = await events.after(sessions, job, 0, limit=10)
    assert [row.id for row in found.rows] == ["evt_0", "evt_1", "evt_2"]
    assert found.rows[0].data == {"n": 0, "x": None}
    rest = await events.after(sessions, job, found.rows[0].number, limit=1)
    assert ([row.id for row in rest.rows], rest.has_more) == (["evt_1"], True)
    newest = await events.newest(sessions, job, limit=2)
    assert [row.id for row in newest.rows] == ["evt_2", "evt_1"]
    older = await events.newest(sessions, job, limit=2, before=await events.number(sessions, job, "evt_1"))
    assert ([row.id for row in older.rows], older.has_more) == (["evt_0"], False)
    with pytest.raises(NotFound):
        await events.number(sessions, job, "evt_9")


async def test_a_reader_that_follows_misses_no_event_of_writers_at_the_same_time(sessions: Sessions, job: str) -> None:
    writers = asyncio.gather(*(events.append(sessions, [_event(job, n)]) for n in range(40)))
    seen: list[str] = []
    last = 0
    while len(seen) < 40:
        for row in (await events.after(sessions, job, last, limit=7)).rows:
            last = row.number
            seen.append(row.id)
        await asyncio.sleep(0)
    await writers
    assert sorted(seen) == sorted(f"evt_{n}" for n in range(40))


def test_an_event_of_the_bus_needs_an_object_as_data() -> None:
    event = events_pb2.Event(id="e", job="j", level="info", type="t", source="s")
    assert NewEvent.from_message(event, job="j", source="s").data == {}
    for bad in ("[]", "{", "[" * 100_000):
        event.data_json = bad
        with pytest.raises(CorruptData, match="data_json"):
            NewEvent.from_message(event, job="j", source="s")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("job", "other"),
        ("source", "other"),
        ("level", "loud"),
        ("id", ""),
        ("id", "\0"),
        ("type", "x" * 101),
        ("at", float("nan")),
        ("at", float("inf")),
    ],
)
def test_an_event_that_sql_could_not_keep_or_of_somebody_else_is_corrupt(field: str, value: Any) -> None:
    """It comes from a durable queue: one that failed in SQL would come again for ever, and hold up all behind it."""
    event = events_pb2.Event(id="e", job="j", level="info", type="t", source="s", at=1.0)
    setattr(event, field, value)
    with pytest.raises(CorruptData):
        NewEvent.from_message(event, job="j", source="s")


async def test_a_step_is_recorded_once_and_replaced_only_by_a_newer_claim(sessions: Sessions, job: str) -> None:
    async def record(step: int, fence: int, reward: float) -> bool:
        metrics = {"reward": reward, "bad": float("inf")}
        return await steps.record(sessions, job, step, version=step, digest="d", fence=fence, metrics=metrics, now=1.0)

    assert await record(0, 1, 0.0)
    assert await record(1, 1, 0.5)
    assert not await record(1, 1, 0.7)
    await jobs.claim(sessions, trainer="t", now=2.0)
    with pytest.raises(Fenced):
        await record(2, 1, 0.1)
    assert await record(1, 2, 0.9)
    curves = await steps.curves(sessions, job)
    assert curves.steps == [0, 1]
    assert curves.series == {"bad": [None, None], "reward": [0.0, 0.9]}
    assert (await jobs.get(sessions, job)).step == 1
    some = await steps.curves(sessions, job, names=["reward", "none"], from_step=1)
    assert some.series == {"reward": [0.9], "none": [None]}


async def test_a_checkpoint_is_kept_once_a_step(sessions: Sessions, job: str) -> None:
    async def record(step: int, path: str) -> str:
        row = await checkpoints.record(
            sessions, job, step, version=step, path=path, digest="d", metrics={"x": 1.0}, now=1.0
        )
        return row.id

    first = await record(1, "a")
    assert await record(1, "a") == first
    assert await record(1, "b") == first
    second = await record(2, "c")
    newest = await checkpoints.latest(sessions, job)
    assert newest is not None
    assert newest.id == second
    listed = await checkpoints.listing(sessions, job, limit=1)
    assert ([row.id for row in listed.rows], listed.has_more) == ([second], True)
    behind = await checkpoints.listing(sessions, job, limit=1, after=second)
    assert [(row.id, row.path) for row in behind.rows] == [(first, "b")]
    assert (await checkpoints.latest_of(sessions, [job]))[job].id == second
    await checkpoints.forget(sessions, job, [2])
    assert await checkpoints.at_step(sessions, job, 2) is None


async def test_samples_are_found_by_step_and_reward(sessions: Sessions, job: str) -> None:
    handles = [0, 1, 2, 3, 2**32 - 1]
    async with sessions.begin() as session:
        for ordinal in (0, 1):
            session.add(
                Group(job=job, ordinal=ordinal, state="trained", step=ordinal, position=0, prompt=0, data_epoch=0,
                      tokens=4, staleness=0, at=1.0)
            )  # fmt: skip
        for index, handle in enumerate(handles):
            session.add(
                Sample(job=job, handle=handle, response_id=response_id(job, handle), group=index // 2, finish="eos",
                       ids=ids_bytes([2**32 - 1]), logprobs=b"\0" * 4, runs=[[1, 0]], pieces=[[0, 1, "1", "w"]],
                       prompt_text="p", text="t", reward=index / 4, components=[], at=1.0)
            )  # fmt: skip
    everything = await samples.listing(sessions, job, limit=10)
    assert [found.sample.handle for found in everything.rows] == handles[::-1]
    assert everything.rows[0].group is None
    of_step = await samples.listing(sessions, job, limit=10, step=1)
    assert [found.sample.handle for found in of_step.rows] == [3, 2]
    good = await samples.listing(sessions, job, limit=1, min_reward=0.5, after=response_id(job, handles[-1]))
    assert ([found.sample.handle for found in good.rows], good.has_more) == ([3], True)
    one = await samples.get(sessions, job, response_id(job, handles[-1]))
    assert one is not None
    assert one.sample.ids == b"\xff\xff\xff\xff"
    assert await samples.get(sessions, job, response_id(job, 7)) is None
    for foreign in ("x", "resp_other_1", response_id(job, 2**40)):
        with pytest.raises(NotFound):
            await samples.get(sessions, job, foreign)


async def test_text_that_a_model_makes_up_is_kept(sessions: Sessions, job: str) -> None:
    group = Group(job=job, ordinal=0, state="accepted", prompt=0, data_epoch=0, tokens=1, at=1.0)
    sample = Sample(
        job=job, handle=0, response_id=response_id(job, 0), group=0, finish="eos", ids=ids_bytes([1]), logprobs=b"\0" * 4,
        runs=[[1, 0]], pieces=[], prompt_text="p\0", text="a\0b\ud800", reward=0.0, components=[], at=1.0,
    )  # fmt: skip
    assert await groups.record(sessions, group, [sample], epoch=1)
    found = await samples.get(sessions, job, response_id(job, 0))
    assert found is not None
    assert (found.sample.prompt_text, found.sample.text) == ("p\ufffd", "a\ufffdb?")
    assert await groups.counts(sessions, job) == {"accepted": 1}
    assert await groups.versions(sessions, job) == {}


async def test_an_older_incarnation_of_a_worker_changes_nothing(sessions: Sessions) -> None:
    async def join(incarnation: int, state: str) -> None:
        await workers.join(sessions, "wkr_1", incarnation, now=float(incarnation), state=state,
                           worker_class="preemptible", hostname="h", pid=1, engines=["stub"], slots=4)  # fmt: skip

    await join(2**40, "joining")
    await join(1, "old")
    await workers.set_state(sessions, "wkr_1", 1, "old")
    await workers.leave(sessions, "wkr_1", 1, state="dead", reason="old", now=9.0)
    assert (await workers.get(sessions, "wkr_1")).state == "joining"
    await workers.set_state(sessions, "wkr_1", 2**40, "ready")
    await workers.leave(sessions, "wkr_1", 2**40, state="gone", reason="drained", now=9.0)
    row = await workers.get(sessions, "wkr_1")
    assert (row.state, row.left_at, row.reason) == ("gone", 9.0, "drained")
    await join(2**40 + 1, "joining")
    row = await workers.get(sessions, "wkr_1")
    assert (row.state, row.left_at) == ("joining", None)
    assert [row.id for row in await workers.newest(sessions, limit=5)] == ["wkr_1"]
    with pytest.raises(NotFound):
        await workers.get(sessions, "wkr_2")
