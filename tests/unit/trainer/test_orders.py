"""Orders end whatever waits."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest_trainer.orders import Order, Orders, Stopped


@given(st.lists(st.sampled_from(list(Order)), min_size=1))
def test_the_strongest_order_stands(given_orders: list[Order]) -> None:
    orders = Orders()
    for order in given_orders:
        orders.give(order)
    assert orders.current == max(given_orders)
    assert orders.given()


async def test_work_is_cancelled_by_an_order_and_has_ended_before_stopped_is_raised() -> None:
    orders = Orders()
    ended = []

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.append(True)

    waiting = asyncio.create_task(orders.obeying(work()))
    await asyncio.sleep(0)
    orders.give(Order.PAUSE)
    with pytest.raises(Stopped):
        await waiting
    assert ended == [True]


async def test_nothing_starts_after_an_order_and_results_and_faults_come_through_before() -> None:
    orders = Orders()
    assert await orders.obeying(asyncio.sleep(0, 7)) == 7

    async def fault() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await orders.obeying(fault())
    orders.give(Order.RELEASE)
    with pytest.raises(Stopped):
        await orders.obeying(asyncio.sleep(60))


async def test_a_fault_of_what_goes_on_by_itself_ends_the_wait_unless_an_order_did() -> None:
    orders = Orders()
    waiting = asyncio.create_task(orders.obeying(asyncio.sleep(60)))
    await asyncio.sleep(0)
    orders.fail(ValueError("first"))
    orders.fail(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await waiting
    assert orders.given()
    orders.give(Order.PAUSE)
    with pytest.raises(Stopped):
        await orders.obeying(asyncio.sleep(60))


async def test_work_that_an_order_interrupts_is_stopped_and_not_at_fault() -> None:
    orders = Orders()

    async def interrupted() -> None:
        orders.give(Order.RELEASE)
        raise ValueError("interrupted")

    with pytest.raises(Stopped):
        await orders.obeying(interrupted())
