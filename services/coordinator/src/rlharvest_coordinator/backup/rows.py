"""All rows of one database into another: SQLite or PostgreSQL on either side, both at the newest revision.

Invariants: the source is read in one snapshot; the target is written in one transaction, so it has all rows or none.
"""

from __future__ import annotations

import contextlib
import sqlite3
from pathlib import Path
from typing import Any

from rlharvest.errors import Conflict
from sqlalchemy import Integer, Table, func, insert, select, text
from sqlalchemy.ext.asyncio import AsyncConnection

from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.tables import Base

AT_A_TIME = 500
"""Rows in memory at a time; a sample holds all tokens of a response."""

Counts = dict[str, int]
"""Table -> rows."""


async def dump(url: str, file: Path) -> Counts:
    """Write everything that the database at `url` holds into a new SQLite file.

    Raises:
        InvalidField: the database is not at this version's revision.
    """
    copy = sqlite_url(file)
    await migrations.migrate(copy)
    source, target = sql.connect(url), sql.connect(copy)
    try:
        await migrations.require_newest(source)
        async with source.connect() as connection, target.begin() as into:
            await _begin_snapshot(connection)
            counts = await _copy(connection, into)
    finally:
        await source.dispose()
        await target.dispose()
    _fold_journal(file)
    return counts


async def require_empty(url: str) -> None:
    """Raise Conflict if the database has rows; it has the tables."""
    engine = sql.connect(url)
    try:
        async with engine.connect() as connection:
            for table in Base.metadata.sorted_tables:
                if await connection.scalar(select(func.count()).select_from(table)):
                    raise Conflict(
                        f"the database has rows in {table.name!r} already. Restore into an empty one: a new data "
                        "directory, or new volumes"
                    )
    finally:
        await engine.dispose()


async def load(file: Path, url: str) -> Counts:
    """Write everything that a SQLite file of `dump` holds into the database at `url`, which has the tables and no rows."""
    source, target = sql.connect(sqlite_url(file)), sql.connect(url)
    try:
        async with source.connect() as connection, target.begin() as into:
            counts = await _copy(connection, into)
            if into.dialect.name == "postgresql":
                await _advance_sequences(into)
            return counts
    finally:
        await source.dispose()
        await target.dispose()


def sqlite_url(file: Path) -> str:
    """Return the SQLAlchemy URL of a SQLite file."""
    return f"sqlite+aiosqlite:///{file.absolute()}"


def _fold_journal(file: Path) -> None:
    """Make the one file all there is."""
    with contextlib.closing(sqlite3.connect(file)) as connection:
        connection.execute("PRAGMA journal_mode=DELETE")


async def _begin_snapshot(connection: AsyncConnection) -> None:
    """From here on the connection sees one state of the whole database."""
    if connection.dialect.name == "postgresql":
        await connection.execute(text("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ READ ONLY"))
    else:
        # Python's driver begins no transaction for reads. The first read of this one takes the snapshot.
        await connection.exec_driver_sql("BEGIN")


async def _copy(source: AsyncConnection, target: AsyncConnection) -> Counts:
    counts: Counts = {}
    for table in Base.metadata.sorted_tables:
        counts[table.name] = 0
        rows = await source.stream(select(table).order_by(*table.primary_key.columns))
        async for part in rows.mappings().partitions(AT_A_TIME):
            await target.execute(insert(table), [dict(row) for row in part])
            counts[table.name] += len(part)
    return counts


async def _advance_sequences(connection: AsyncConnection) -> None:
    """PostgreSQL numbers new rows from a sequence, which copied rows have not moved."""
    for table in Base.metadata.sorted_tables:
        for column in _numbered(table):
            newest = await connection.scalar(select(func.max(column)))
            if newest is not None:
                await connection.execute(
                    text("SELECT setval(pg_get_serial_sequence(:table, :column), :newest)"),
                    {"table": table.name, "column": column.name, "newest": newest},
                )


def _numbered(table: Table) -> list[Any]:
    columns = list(table.primary_key.columns)
    return columns if len(columns) == 1 and isinstance(columns[0].type, Integer) else []
