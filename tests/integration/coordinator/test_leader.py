"""Who leads: one at a time, a successor only after a full lease, and nobody writes over who came after."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.clock import SystemClock
from rlharvest.errors import Fenced
from rlharvest.supervise import cancel
from rlharvest.testing.clock import FakeClock
from rlharvest_coordinator import sql
from rlharvest_coordinator.leader import RELEASED, Leadership
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import fence
from rlharvest_coordinator.tables import Base, Leader
from sqlalchemy import select

LEASE_S = 1.0


def contender(sessions: Sessions, name: str, clock: FakeClock) -> Leadership:
    return Leadership(sessions, name, clock, lease_s=LEASE_S)


async def record(sessions: Sessions) -> Leader:
    async with sessions() as session:
        return (await session.execute(select(Leader))).scalar_one()


async def soon(true: Callable[[], object], *, timeout_s: float = 10.0) -> None:
    """Wait, in real time, for what needs no turn of the fake clock."""
    async with asyncio.timeout(timeout_s):
        while not true():  # noqa: ASYNC110 - tasks end without an event
            await asyncio.sleep(0.005)


async def turn(clock: FakeClock, seconds: float, *, pause_s: float = 0.02) -> None:
    """Let time pass in small steps, and what it wakes do its work in between."""
    for _ in range(round(seconds / 0.05)):
        clock.advance(0.05)
        await asyncio.sleep(pause_s)


async def taken(clock: FakeClock, taking: asyncio.Task[int]) -> int:
    """Let time pass until the lead is taken; return the epoch. A busy machine may see a beat, or its absence, late."""
    async with asyncio.timeout(30):
        while not taking.done():
            await turn(clock, 0.05)
    return taking.result()


async def test_only_one_of_many_contenders_leads(sessions: Sessions) -> None:
    """All start at once on an empty database; the others wait for as long as the first one beats."""
    clock = FakeClock()
    contenders = [contender(sessions, f"crd_{index}", clock) for index in range(6)]
    tasks = [asyncio.create_task(one.acquire()) for one in contenders]
    await soon(lambda: any(task.done() for task in tasks))
    leader = next(one for one, task in zip(contenders, tasks, strict=True) if task.done())
    holding = asyncio.create_task(leader.hold())
    await turn(clock, 2 * LEASE_S, pause_s=0.06)
    assert [one.epoch for one in contenders if one.epoch] == [1]
    assert not holding.done()
    assert (await record(sessions)).holder == leader.holder
    await cancel([holding, *tasks])


async def test_a_successor_waits_for_a_full_lease_on_its_own_clock(sessions: Sessions) -> None:
    """The time of the dead leader's last beat plays no part: the lease starts when the contender sees the beat stand."""
    dead, mine = FakeClock(start=5e9), FakeClock(start=10.0)
    old = contender(sessions, "old", dead)
    assert await old.acquire() == 1
    new = contender(sessions, "new", mine)
    taking = asyncio.create_task(new.acquire())
    await turn(mine, 0.9 * LEASE_S)
    assert not taking.done()
    assert await taken(mine, taking) == 2
    assert (await record(sessions)).holder == "new"


async def test_a_beat_starts_the_wait_anew(sessions: Sessions) -> None:
    """A leader that beats once just before its lease ends keeps the lead for another one."""
    clock, other = FakeClock(), FakeClock()
    old = contender(sessions, "old", other)
    await old.acquire()
    holding = asyncio.create_task(old.hold())
    new = contender(sessions, "new", clock)
    taking = asyncio.create_task(new.acquire())
    await turn(clock, 0.8 * LEASE_S)
    beat = (await record(sessions)).beat
    async with asyncio.timeout(30):
        while (await record(sessions)).beat == beat:
            other.advance(0.1 * LEASE_S)
            await asyncio.sleep(0.02)
    await turn(clock, 0.8 * LEASE_S)
    assert not taking.done()
    assert await taken(clock, taking) == 2
    await cancel([holding])


async def test_a_lease_that_was_released_is_taken_at_once(sessions: Sessions) -> None:
    """No time passes at all; release is idempotent."""
    clock = FakeClock()
    old = contender(sessions, "old", clock)
    await old.acquire()
    await old.release()
    await old.release()
    assert old.epoch == 0
    assert (await record(sessions)).holder == RELEASED
    assert await asyncio.wait_for(contender(sessions, "new", clock).acquire(), 5) == 2


async def test_two_that_wait_for_a_released_lease_do_not_both_get_it(sessions: Sessions) -> None:
    """The compare-and-set lets one through; the other waits for the new holder."""
    clock = FakeClock()
    old = contender(sessions, "old", clock)
    await old.acquire()
    await old.release()
    tasks = [asyncio.create_task(contender(sessions, name, clock).acquire()) for name in ("a", "b", "c")]
    await soon(lambda: any(task.done() for task in tasks))
    await asyncio.sleep(0.2)
    assert [task.result() for task in tasks if task.done()] == [2]
    await cancel(tasks)


async def replaced(sessions: Sessions) -> tuple[Leadership, FakeClock]:
    """A leader of epoch 1 after somebody else took epoch 2."""
    clock, mine = FakeClock(), FakeClock()
    old = contender(sessions, "old", clock)
    await old.acquire()
    taking = asyncio.create_task(contender(sessions, "new", mine).acquire())
    await turn(mine, 1.3 * LEASE_S)
    assert await asyncio.wait_for(taking, 5) == 2
    return old, clock


async def test_a_leader_that_was_replaced_learns_it_at_its_next_beat(sessions: Sessions) -> None:
    old, clock = await replaced(sessions)
    holding = asyncio.create_task(old.hold())
    await turn(clock, LEASE_S / 2)
    with pytest.raises(Fenced, match="after epoch 1"):
        await asyncio.wait_for(holding, 5)


async def test_a_leader_that_was_replaced_cannot_go_on_in_a_new_epoch(sessions: Sessions) -> None:
    old, _ = await replaced(sessions)
    with pytest.raises(Fenced):
        await old.advance()
    assert old.epoch == 1
    assert (await record(sessions)).epoch == 2


async def test_a_leader_that_was_replaced_does_not_release_the_lease_of_its_successor(sessions: Sessions) -> None:
    old, _ = await replaced(sessions)
    await old.release()
    found = await record(sessions)
    assert (found.epoch, found.holder) == (2, "new")


async def test_the_fence_refuses_writes_of_a_leader_that_was_replaced(sessions: Sessions) -> None:
    """Inside the writer's own transaction: nothing of it is kept."""
    await replaced(sessions)
    with pytest.raises(Fenced, match="epoch 2 leads"):
        async with sessions.begin() as session:
            await fence.require(session, 1)
    async with sessions.begin() as session:
        await fence.require(session, 2)
        await fence.require(session, None)


async def test_a_take_over_comes_before_the_check_or_after_the_commit(sessions: Sessions) -> None:
    """While a leader's write is open nobody takes over; once it is committed, somebody does."""
    clock = FakeClock()
    old = contender(sessions, "old", clock)
    await old.acquire()
    taken: asyncio.Task[int]
    async with sessions.begin() as session:
        await fence.require(session, 1)
        taken = asyncio.create_task(_take(sessions))
        await asyncio.sleep(0.3)
        assert not taken.done()
    assert await asyncio.wait_for(taken, 15) == 2


async def _take(sessions: Sessions) -> int:
    clock = FakeClock()
    new = contender(sessions, "new", clock)
    taking = asyncio.create_task(new.acquire())
    while not taking.done():
        await turn(clock, LEASE_S)
    return taking.result()


async def test_a_leader_advances_in_its_own_lease(sessions: Sessions) -> None:
    """After a recovery: the epoch rises, the beat goes on, nobody else gets in between."""
    clock = FakeClock()
    leader = contender(sessions, "leader", clock)
    await leader.acquire()
    holding = asyncio.create_task(leader.hold())
    assert await leader.advance() == 2
    await turn(clock, LEASE_S)
    assert not holding.done()
    assert (await record(sessions)).epoch == 2
    await cancel([holding])


STEPS = st.lists(st.tuples(st.sampled_from(["acquire", "advance", "release", "beat"]), st.integers(0, 2)), max_size=10)


@settings(max_examples=15, deadline=None)
@given(STEPS)
def test_epochs_only_rise_and_none_is_held_twice(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]]
) -> None:
    """Whatever three coordinators do in whatever order, no two ever lead in the same epoch."""
    directory = tmp_path_factory.mktemp("leaders")

    async def check(path: Path) -> None:
        engine = sql.connect(f"sqlite+aiosqlite:///{path / 'test.sqlite3'}")
        async with engine.begin() as connection:
            await connection.run_sync(Base.metadata.create_all)
        sessions = sql.sessions(engine)
        # A short lease on the real clock: who asks waits it out.
        three = [Leadership(sessions, f"crd_{index}", SystemClock(), lease_s=0.02) for index in range(3)]
        seen: dict[int, str] = {}
        last = 0
        try:
            for action, index in steps:
                one = three[index]
                if action == "acquire" and not one.epoch:
                    await one.acquire()
                elif action == "advance" and one.epoch:
                    try:
                        await one.advance()
                    except Fenced:
                        one.epoch = 0
                elif action == "release":
                    await one.release()
                elif action == "beat" and one.epoch:
                    await _beat(one)
                if one.epoch:
                    assert seen.setdefault(one.epoch, one.holder) == one.holder
                if seen:
                    epoch = (await record(sessions)).epoch
                    assert epoch >= last
                    last = epoch
        finally:
            await engine.dispose()

    asyncio.run(check(directory))


async def _beat(leadership: Leadership) -> None:
    """Hold for a moment; one that was replaced stops to lead."""
    try:
        async with asyncio.timeout(0.02):
            await leadership.hold()
    except TimeoutError:
        pass
    except Fenced:
        leadership.epoch = 0
