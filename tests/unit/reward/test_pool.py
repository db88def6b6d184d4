"""The pool: never more processes than its size, warm ones reused, broken ones replaced."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.testing.clock import FakeClock
from rlharvest_reward.pool import Pool


class Fake:
    alive = 0
    most = 0

    def __init__(self, key: str) -> None:
        self.key = key
        self.usable = True
        self.calls = 0
        self.closed = False
        Fake.alive += 1
        Fake.most = max(Fake.most, Fake.alive)

    async def close(self) -> None:
        assert not self.closed
        self.closed = True
        Fake.alive -= 1


async def start(key: str) -> Fake:
    await asyncio.sleep(0)
    return Fake(key)


@pytest.fixture(autouse=True)
def _count() -> None:
    Fake.alive = Fake.most = 0


async def test_a_process_stays_warm_for_its_key_only() -> None:
    pool = Pool(start, size=2, idle_s=10)
    async with pool.process("a") as first:
        pass
    async with pool.process("a") as second:
        assert second is first
    async with pool.process("b") as third:
        assert third is not first
    assert (pool.started, pool.idle, pool.busy) == (2, 2, 0)


async def test_another_key_takes_the_place_of_the_least_recently_used() -> None:
    pool = Pool(start, size=2, idle_s=10)
    for key in ("a", "b", "a", "c"):
        async with pool.process(key) as process:
            assert process.key == key
    assert Fake.alive == 2
    async with pool.process("a"):
        pass
    assert pool.started == 3  # b was closed for c; a is still warm


async def test_its_size_is_the_same_after_a_hundred_broken_processes() -> None:
    pool = Pool(start, size=3, idle_s=10)
    for _ in range(100):
        async with pool.process("a") as process:
            process.usable = False
    assert (Fake.alive, pool.busy, pool.idle, pool.started) == (0, 0, 0, 100)
    async with pool.process("a"), pool.process("a"), pool.process("a"):
        assert pool.busy == 3


async def test_a_start_that_fails_frees_its_place() -> None:
    async def fail(key: str) -> Fake:
        raise ValueError(key)

    pool = Pool(fail, size=1, idle_s=10)
    for _ in range(3):
        with pytest.raises(ValueError):
            async with pool.process("a"):
                pass
    assert pool.busy == 0


async def test_idle_processes_are_reaped() -> None:
    clock = FakeClock()
    pool = Pool(start, size=2, idle_s=10, clock=clock)
    async with pool.process("a"), pool.process("b"):
        pass
    clock.advance(9)
    assert await pool.reap() == 0
    async with pool.process("a"):
        pass
    clock.advance(2)
    assert await pool.reap() == 1
    assert Fake.alive == 1


async def test_a_process_that_comes_back_to_a_closed_pool_is_closed() -> None:
    pool = Pool(start, size=1, idle_s=10)
    async with pool.process("a"):
        await pool.close()
    assert Fake.alive == 0


@settings(max_examples=30, deadline=None)
@given(
    size=st.integers(1, 3),
    calls=st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.booleans(), st.booleans()), max_size=25),
)
def test_in_any_order_of_calls_no_process_is_too_many_or_lost(
    size: int, calls: list[tuple[str, int, bool, bool]]
) -> None:
    Fake.alive = Fake.most = 0

    async def run() -> None:
        pool = Pool(start, size=size, idle_s=10)

        async def call(key: str, turns: int, breaks: bool, cancelled: bool) -> None:
            async with pool.process(key) as process:
                assert process.key == key
                process.calls += 1
                for _ in range(turns):
                    await asyncio.sleep(0)
                if cancelled:
                    process.usable = False
                    raise asyncio.CancelledError
                process.usable = not breaks

        await asyncio.gather(*(call(*each) for each in calls), return_exceptions=True)
        assert pool.busy == 0
        assert Fake.alive == pool.idle <= size
        assert Fake.most <= size
        await pool.close()
        assert Fake.alive == 0

    asyncio.run(run())
