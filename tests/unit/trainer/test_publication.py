"""A publication that goes on by itself never fails in silence."""

from __future__ import annotations

import asyncio

import pytest
from rlharvest.errors import DiskFull
from rlharvest_trainer.orders import Order, Orders, Stopped
from rlharvest_trainer.publication import InFlight
from structlog.testing import capture_logs


async def fails() -> None:
    await asyncio.sleep(0.01)
    raise DiskFull("no space")


async def test_its_fault_ends_whatever_the_run_waits_for() -> None:
    orders = Orders()
    InFlight(orders).launch(fails())
    with pytest.raises(DiskFull, match="no space"):
        await orders.obeying(asyncio.sleep(60))
    assert orders.given()


async def test_its_fault_is_raised_where_it_is_waited_for() -> None:
    flight = InFlight(Orders())
    flight.launch(fails())
    with pytest.raises(DiskFull, match="no space"):
        await flight.landed()


async def test_one_that_lands_makes_room_for_the_next() -> None:
    flight = InFlight(Orders())
    for _ in range(2):
        flight.launch(asyncio.sleep(0))
        await flight.landed()
    await flight.landed()


async def test_an_order_ends_the_wait_and_the_fault_is_logged_at_the_end() -> None:
    orders = Orders()
    flight = InFlight(orders)
    flight.launch(fails())
    orders.give(Order.PAUSE)
    with pytest.raises(Stopped):
        await flight.landed()
    with capture_logs() as lines:
        await flight.abandon(5.0)
    assert [line["event"] for line in lines] == ["publish.dropped"]
    assert "no space" in lines[0]["error"]


async def test_abandoning_one_that_hangs_cancels_it() -> None:
    flight = InFlight(Orders())
    flight.launch(asyncio.sleep(60))
    await flight.abandon(0.01)
    await flight.abandon(0.01)
