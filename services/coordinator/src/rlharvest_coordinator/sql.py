"""Connecting to SQL: SQLite and PostgreSQL behind one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sqlalchemy import event
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncEngine, AsyncSession, async_sessionmaker, create_async_engine

Sessions = async_sessionmaker[AsyncSession]

FAULTS = (DBAPIError, PoolTimeout, OSError)
"""What any statement may raise while the database is away: it may have been made all the same."""

CACHE_KIB = 256
"""Pages of SQLite that each connection keeps; the operating system keeps the file."""

CONNECTIONS = 15
"""To SQLite at a time. Those that were opened stay: one more than stay would be opened, with a thread, again and again."""


def connect(url: str) -> AsyncEngine:
    """Return an engine; SQLite gets WAL, a sync at each commit (epochs must never come back), and foreign keys."""
    parsed = make_url(url)
    if parsed.get_backend_name() != "sqlite":
        return create_async_engine(url, pool_pre_ping=True, pool_size=10)
    pool: dict[str, Any] = {}
    if parsed.database and parsed.database != ":memory:":
        Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
        # The one that was used last is used first, so that there are no more than work at a time.
        pool = {"pool_size": CONNECTIONS, "max_overflow": 0, "pool_use_lifo": True}
    engine = create_async_engine(url, connect_args={"timeout": 10}, **pool)

    @event.listens_for(engine.sync_engine, "connect")
    def connected(connection: Any, _record: Any) -> None:
        cursor = connection.cursor()
        pragmas = ("journal_mode=WAL", "synchronous=FULL", "busy_timeout=10000", "foreign_keys=ON")
        for pragma in (*pragmas, f"cache_size=-{CACHE_KIB}"):
            cursor.execute(f"PRAGMA {pragma}")
        cursor.close()

    return engine


def sessions(engine: AsyncEngine) -> Sessions:
    """Return a factory of sessions whose objects stay readable after a commit."""
    return async_sessionmaker(engine, expire_on_commit=False)
