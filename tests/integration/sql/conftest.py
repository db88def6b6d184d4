"""Every test here runs on SQLite and on PostgreSQL."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rlharvest.jobs.model import JobSpec, parse
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.sql import Sessions


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty database."""
    if request.param == "sqlite":
        return f"sqlite+aiosqlite:///{tmp_path / 'test.sqlite3'}"
    url: str = request.getfixturevalue("postgres_server").database()
    return url


@pytest.fixture
async def sessions(database_url: str) -> AsyncIterator[Sessions]:
    """A database at the newest revision."""
    await migrations.migrate(database_url)
    engine = sql.connect(database_url)
    yield sql.sessions(engine)
    await engine.dispose()


@pytest.fixture
def spec() -> JobSpec:
    """A small job."""
    return parse({"model": "m", "dataset": {"path": "d.jsonl"}, "rewards": [{"builtin": "exact_match"}]})
