"""Nothing of a job that ended stays in a coordinator's memory."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rlharvest.v1 import ledger_pb2
from rlharvest_coordinator import sql
from rlharvest_coordinator.batches import Batches
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.log import Log
from sqlalchemy import event, text

CHANGE = ledger_pb2.Change(begin=ledger_pb2.Begin())


class Recording:
    """A log that remembers what was put into it."""

    def __init__(self) -> None:
        self.transitions: list[tuple[str, int]] = []

    async def publish(self, job: str, transition: ledger_pb2.Transition) -> int:
        self.transitions.append((job, transition.number))
        return len(self.transitions)


class Forgetful:
    """A store with nothing in it."""

    async def forget(self, job: str) -> None:
        pass


def per_job(keeper: Any) -> list[str]:
    """What an object keeps by job."""
    return [name for name, value in vars(keeper).items() if isinstance(value, dict | set | list) and value]


async def test_the_keeper_numbers_transitions_without_remembering_their_jobs() -> None:
    """No two transitions of an epoch have one number, so that none passes for another's duplicate."""
    log = Recording()
    keeper = Keeper(cast(Log, log), cast(Any, Forgetful()), 1, cast(Any, None))
    for number in range(100):
        await keeper.propose(f"job_{number % 50}", [CHANGE])
    for number in range(50):
        await keeper.close_job(f"job_{number}")
    assert len(set(log.transitions)) == 100
    assert len({number for _, number in log.transitions}) == 100
    assert per_job(keeper) == []


async def test_who_trains_is_remembered_by_the_run() -> None:
    """A trainer that still renews while its job closes leaves nothing behind."""
    run: Any = SimpleNamespace(
        id="job", closed=True, trainer_heard=None, scope=SimpleNamespace(row=SimpleNamespace(fence=1))
    )
    runs = {"job": run}
    clock: Any = SimpleNamespace(monotonic=lambda: 5.0)
    batches = Batches(
        runs,
        cast(Any, None),
        clock,
        epoch=lambda: 1,
        checkpoints_dir=Path(),
        deadline_s=1.0,
        on_version=cast(Any, None),
    )
    assert await batches._fenced("job", 1, cast(Any, None)) is run
    assert run.trainer_heard == 5.0
    runs.clear()
    assert per_job(batches) == []


async def test_the_memory_of_a_connection_to_sqlite_is_bounded(tmp_path: Path) -> None:
    """By itself SQLite keeps up to 2 MB of pages for each connection, whatever the file's growth brings in."""
    engine = sql.connect(f"sqlite+aiosqlite:///{tmp_path / 'x.sqlite3'}")
    async with engine.connect() as connection:
        assert await connection.scalar(text("PRAGMA cache_size")) == -sql.CACHE_KIB
    await engine.dispose()
    assert sql.CACHE_KIB <= 512


async def test_connections_to_sqlite_are_opened_once(tmp_path: Path) -> None:
    """Each has a thread and a cache: many at a time, again and again, open no more than the most at a time."""
    engine = sql.connect(f"sqlite+aiosqlite:///{tmp_path / 'x.sqlite3'}")
    opened = []
    event.listen(engine.sync_engine, "connect", lambda *_: opened.append(1))

    async def use(barrier: asyncio.Barrier) -> None:
        async with engine.connect() as connection:
            await connection.execute(text("SELECT 1"))
            await barrier.wait()

    for _ in range(5):
        barrier = asyncio.Barrier(12)
        await asyncio.gather(*(use(barrier) for _ in range(12)))
    await engine.dispose()
    assert len(opened) == 12
