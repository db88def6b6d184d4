"""Databases, and the log and store of a coordinator on real servers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from nats.aio.client import Client
from rlharvest import bus
from rlharvest.ledger.store import Store
from rlharvest.testing.servers import NatsServer, ValkeyServer
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.sql import Sessions


@pytest.fixture(params=["sqlite", "postgresql"])
async def sessions(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Sessions]:
    """An empty database at the newest revision."""
    if request.param == "sqlite":
        url = f"sqlite+aiosqlite:///{tmp_path / 'test.sqlite3'}"
    else:
        url = request.getfixturevalue("postgres_server").database()
    await migrations.migrate(url)
    engine = sql.connect(url)
    yield sql.sessions(engine)
    await engine.dispose()


@pytest.fixture
async def nats(nats_server: NatsServer) -> AsyncIterator[Client]:
    """A connection to a NATS of this test's own."""
    client = await bus.connect(nats_server.url, "test")
    yield client
    await client.close()


@pytest.fixture
async def store(valkey_server: ValkeyServer) -> AsyncIterator[Store]:
    """The ledger's store in a Valkey of this test's own."""
    found = Store.connect(valkey_server.url)
    yield found
    await found.close()
