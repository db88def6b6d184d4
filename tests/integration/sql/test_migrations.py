"""Revisions and tables.py are the same schema, and what an older one holds comes through.

The walk below needs no change for a new revision: it stops at each one that there is, puts a row into every table as it is
there, and looks at all of them again at the end.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from rlharvest.errors import Conflict, InvalidField
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.tables import Base
from sqlalchemy import BigInteger, Boolean, Connection, MetaData, Table, func, insert, inspect, select, text
from sqlalchemy.orm import Session

SCRIPTS = ScriptDirectory.from_config(migrations.config())
REVISIONS = [script.revision for script in SCRIPTS.walk_revisions()][::-1]

VALUES: dict[type, Any] = {float: 1.5e9 + 1 / 3, bytes: bytes(range(256)), dict: {"a": [1, None, "ü"], "b": {"c": 0.5}}}

Row = dict[str, Any]


def _value(column: Any, table: Table, number: int) -> Any:
    """A value that differs from table to table, column to column and row to row wherever the type has room for it."""
    if column.foreign_keys:
        (key,) = column.foreign_keys
        return _value(key.column, key.column.table, number)
    if isinstance(column.type, Boolean):
        return True
    kind = column.type.python_type
    if kind is int:
        return (1 << 40) + number if isinstance(column.type, BigInteger) else number
    return VALUES.get(kind, f"{table.name}.{column.name} of row {number}")


def _fill(connection: Connection, number: int) -> dict[str, Row]:
    """Insert one row into each table, as the tables are now; return them by table."""
    metadata = MetaData()
    metadata.reflect(connection)
    rows = {}
    for table in metadata.sorted_tables:
        if table.name != "alembic_version":
            rows[table.name] = {column.name: _value(column, table, number) for column in table.columns}
            connection.execute(insert(table).values(rows[table.name]))
    return rows


def _check(connection: Connection, table_name: str, row: Row) -> None:
    """The row is there, with every column that there still is."""
    table = Table(table_name, MetaData(), autoload_with=connection)
    key = [column.name for column in table.primary_key.columns]
    found = connection.execute(select(table).where(*(table.c[name] == row[name] for name in key))).mappings().one()
    kept = {name: value for name, value in row.items() if name in table.c}
    assert {name: found[name] for name in kept} == kept


def _differences(connection: Connection) -> list[object]:
    context = MigrationContext.configure(connection, opts={"compare_type": True})
    return list(compare_metadata(context, Base.metadata))


async def test_the_last_revision_is_what_the_models_say(database_url: str) -> None:
    await migrations.migrate(database_url)
    engine = sql.connect(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(_differences) == []
    await engine.dispose()


async def test_rows_of_every_older_revision_come_through_unchanged(database_url: str) -> None:
    """Upgraded one revision at a time; at the end the models read every row, and no required column is empty."""
    engine = sql.connect(database_url)
    written: list[tuple[str, Row]] = []
    for number, revision in enumerate(REVISIONS, start=1):
        async with engine.begin() as connection:
            await connection.run_sync(
                lambda sync, to=revision: command.upgrade(migrations.config(sync), to)  # type: ignore[misc]
            )
            rows = await connection.run_sync(_fill, number)
            written += rows.items()
    async with engine.connect() as connection:
        for table, row in written:
            if await connection.run_sync(lambda sync, name=table: inspect(sync).has_table(name)):  # type: ignore[misc]
                await connection.run_sync(_check, table, row)
        assert await connection.run_sync(_differences) == []
        await connection.run_sync(_read_with_models)
    await engine.dispose()


def _read_with_models(connection: Connection) -> None:
    with Session(connection) as session:
        for mapper in Base.registry.mappers:
            found = list(session.scalars(select(mapper.class_)))
            assert found, f"no row of {mapper.class_.__name__}"
            for one in found:
                for attribute in mapper.column_attrs:
                    assert attribute.columns[0].nullable or getattr(one, attribute.key) is not None, attribute


async def test_migrating_at_the_same_time_and_again_does_it_once(database_url: str) -> None:
    await asyncio.gather(*(migrations.migrate(database_url) for _ in range(4)))
    await migrations.migrate(database_url)


async def test_there_is_no_way_down(database_url: str) -> None:
    """Downgrading would drop what the older schema has no place for: refused, with nothing changed."""
    await migrations.migrate(database_url)
    engine = sql.connect(database_url)
    for revision in REVISIONS:
        with pytest.raises(Conflict, match="backup"):
            SCRIPTS.get_revision(revision).module.downgrade()
    async with engine.connect() as connection:
        assert await connection.run_sync(_differences) == []
    await engine.dispose()


async def test_a_schema_of_a_newer_version_is_refused_with_what_to_do(database_url: str) -> None:
    await migrations.migrate(database_url)
    engine = sql.connect(database_url)
    async with engine.begin() as connection:
        await connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))
    with pytest.raises(InvalidField, match=r"'9999'.*newer version"):
        await migrations.migrate(database_url)
    with pytest.raises(InvalidField, match=r"'9999'.*newer version"):
        await migrations.require_newest(engine)
    await engine.dispose()


async def test_a_schema_that_was_not_migrated_is_not_served(database_url: str) -> None:
    engine = sql.connect(database_url)
    with pytest.raises(InvalidField, match="rlharvest-coordinator migrate"):
        await migrations.require_newest(engine)
    await migrations.migrate(database_url)
    await migrations.require_newest(engine)
    async with engine.connect() as connection:
        assert await connection.scalar(select(func.count()).select_from(Base.metadata.tables["jobs"])) == 0
    await engine.dispose()
