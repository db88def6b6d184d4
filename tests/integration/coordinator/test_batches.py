"""What a trainer is told while something that the coordinator needs does not answer: to try again, never INTERNAL."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import grpc.aio
import pytest
import structlog
from rlharvest import rpc
from rlharvest.clock import SystemClock
from rlharvest.v1 import batches_pb2, batches_pb2_grpc
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.batches import Batches
from rlharvest_coordinator.obstacles import unavailable
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

Ask = Callable[[float], Awaitable[tuple[grpc.StatusCode, str]]]


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[AsyncEngine]:
    """A database with one connection, for which nobody waits long."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'one.sqlite3'}"
    await migrations.migrate(url)
    one = create_async_engine(url, pool_size=1, max_overflow=0, pool_timeout=0.05)
    yield one
    await one.dispose()


@pytest.fixture
async def ask(engine: AsyncEngine, tmp_path: Path) -> AsyncIterator[Ask]:
    """Ask for a batch of a job that runs; return status and details."""
    spec = SimpleNamespace(algorithm=SimpleNamespace(prompts_per_step=2), limits=SimpleNamespace(max_steps=3))
    scope = SimpleNamespace(spec=spec, row=SimpleNamespace(fence=1))
    opened = SimpleNamespace(open_batch=SimpleNamespace(batched=asyncio.Event()))
    run: Any = SimpleNamespace(id="job", closed=False, scope=scope, harvest=opened, trainer_heard=None)
    batches = Batches(
        {"job": run},
        sql.sessions(engine),
        SystemClock(),
        epoch=lambda: 1,
        checkpoints_dir=tmp_path,
        deadline_s=1.0,
        on_version=lambda *_: None,
    )
    server = rpc.Server(unavailable)
    server.add("rlharvest.v1.Batches", batches_pb2_grpc.add_BatchesServicer_to_server, batches)
    await server.start("127.0.0.1:0")

    async def next_batch(deadline_s: float) -> tuple[grpc.StatusCode, str]:
        request = batches_pb2.NextBatchRequest(job="job", fence=1, step=0, wait_s=0.0)
        async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
            try:
                await batches_pb2_grpc.BatchesStub(channel).NextBatch(request, timeout=deadline_s)
            except grpc.aio.AioRpcError as error:
                return error.code(), error.details() or ""
        return grpc.StatusCode.OK, ""

    yield next_batch
    await server.close(0)


async def test_a_database_whose_connections_are_all_in_use_is_named(engine: AsyncEngine, ask: Ask) -> None:
    """The wait for one ends in an error of SQLAlchemy's own, not in one of the driver."""
    with structlog.testing.capture_logs() as logged:
        async with engine.connect():
            code, details = await ask(60)
        assert (code, details.partition(".")[0]) == (grpc.StatusCode.UNAVAILABLE, "The database does not answer")
        assert "try again" in details
        assert (await ask(60))[0] is grpc.StatusCode.OK, "the connection is back"
    assert "rpc.failed" not in {line["event"] for line in logged}


async def test_callers_that_give_up_leave_no_connection_and_no_fault_behind(engine: AsyncEngine, ask: Ask) -> None:
    with structlog.testing.capture_logs() as logged:
        for turn in range(20):
            await asyncio.gather(*(ask(0.001 * turn) for _ in range(4)))
        assert (await ask(60))[0] is grpc.StatusCode.OK
    assert "rpc.failed" not in {line["event"] for line in logged}
