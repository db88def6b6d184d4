"""No background task dies in silence, and a process stops in its order."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest
from rlharvest.supervise import Supervisor, TaskDied, cancel
from structlog.testing import capture_logs


async def for_ever() -> None:
    await asyncio.Event().wait()


async def fails() -> None:
    await asyncio.sleep(0)
    raise OSError("the cable was cut")


async def returns() -> None:
    await asyncio.sleep(0)


async def test_a_task_that_raises_stops_the_process_and_is_named() -> None:
    supervisor = Supervisor("worker")
    supervisor.spawn("heartbeats", for_ever())
    supervisor.spawn("pump", fails())
    with capture_logs() as logs, pytest.raises(OSError, match="the cable was cut"):
        await asyncio.wait_for(supervisor.run(), 5)
    (entry,) = [entry for entry in logs if entry["event"] == "task.died"]
    assert (entry["task"], entry["service"]) == ("pump", "worker")


async def test_a_task_that_returns_though_the_process_goes_on_is_a_fault() -> None:
    supervisor = Supervisor("worker")
    supervisor.spawn("pump", returns())
    with pytest.raises(TaskDied, match="'pump' of worker returned"):
        await asyncio.wait_for(supervisor.run(), 5)


async def test_a_task_that_may_end_may_but_not_by_an_exception() -> None:
    supervisor = Supervisor("worker")
    await supervisor.spawn("message", returns(), may_end=True)
    await asyncio.sleep(0.01)
    assert not supervisor.stopping.is_set()
    supervisor.spawn("message", fails(), may_end=True)
    with pytest.raises(OSError, match="cable"):
        await asyncio.wait_for(supervisor.run(), 5)


async def test_the_first_fault_is_the_one_that_is_told() -> None:
    supervisor = Supervisor("worker")
    supervisor.stop(ValueError("first"))
    supervisor.stop(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        await supervisor.run()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_runs_the_callbacks_backwards_before_the_tasks_are_cancelled(number: signal.Signals) -> None:
    """Ctrl-C: last opened, first closed; what the callbacks need still runs while they do."""
    supervisor = Supervisor("worker")
    order: list[str] = []

    async def pump() -> None:
        try:
            await for_ever()
        finally:
            order.append("pump ends")

    async def close(name: str) -> None:
        await asyncio.sleep(0.01)
        order.append(name)

    supervisor.spawn("pump", pump())
    supervisor.on_stop(lambda: close("first registered"))
    supervisor.on_stop(lambda: close("last registered"))
    running = asyncio.create_task(supervisor.run())
    await asyncio.sleep(0.05)
    os.kill(os.getpid(), number)
    await asyncio.wait_for(running, 5)
    assert order == ["last registered", "first registered", "pump ends"]


async def test_a_shutdown_that_takes_too_long_is_cut_short() -> None:
    supervisor = Supervisor("worker", grace_s=0.05)
    supervisor.on_stop(for_ever)
    supervisor.spawn("pump", for_ever())
    supervisor.stop()
    with capture_logs() as logs:
        await asyncio.wait_for(supervisor.run(), 5)
    assert "shutdown.slow" in [entry["event"] for entry in logs]


async def test_a_callback_that_fails_is_told_and_the_tasks_end_all_the_same() -> None:
    supervisor = Supervisor("worker")
    task = supervisor.spawn("pump", for_ever())
    supervisor.on_stop(fails)
    supervisor.stop()
    with capture_logs() as logs, pytest.raises(OSError, match="cable"):
        await asyncio.wait_for(supervisor.run(), 5)
    assert "shutdown.failed" in [entry["event"] for entry in logs]
    assert task.cancelled()


async def test_cancel_repeats_until_a_stubborn_task_has_ended() -> None:
    """A cancellation that gets lost on the way is sent again."""
    lost = 0

    async def stubborn() -> None:
        nonlocal lost
        while True:
            try:
                await for_ever()
            except asyncio.CancelledError:
                lost += 1
                if lost > 1:
                    raise

    task = asyncio.create_task(stubborn())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel([task]), 5)
    assert task.cancelled()
    assert lost == 2


async def test_cancel_takes_what_a_task_raises_when_it_is_cancelled() -> None:
    async def raises() -> None:
        try:
            await for_ever()
        finally:
            raise OSError("while closing")

    task = asyncio.create_task(raises())
    await asyncio.sleep(0)
    await asyncio.wait_for(cancel([task]), 5)
    assert isinstance(task.exception(), OSError)
