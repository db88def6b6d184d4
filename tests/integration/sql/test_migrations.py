"""Revisions and tables.py are the same schema."""

from __future__ import annotations

import asyncio

from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.tables import Base
from sqlalchemy import Connection


async def test_the_last_revision_is_what_the_models_say(database_url: str) -> None:
    await migrations.migrate(database_url)

    def differences(connection: Connection) -> list[object]:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        return list(compare_metadata(context, Base.metadata))

    engine = sql.connect(database_url)
    async with engine.connect() as connection:
        assert await connection.run_sync(differences) == []
    await engine.dispose()


async def test_migrating_at_the_same_time_and_again_does_it_once(database_url: str) -> None:
    await asyncio.gather(*(migrations.migrate(database_url) for _ in range(4)))
    await migrations.migrate(database_url)
