"""The schema of SQL, revision by revision (alembic, run from code: there is no alembic.ini).

Invariants: `migrate` may run in any number of processes at a time, one of them does the work; the tables after the last
revision are those of tables.py (a test compares them).
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from sqlalchemy import Connection, text

from rlharvest_coordinator import sql

_LOCK = 7_236_014_552
"""Key of the advisory lock in PostgreSQL; any number that nobody else uses."""


def config(connection: Connection | None = None) -> Config:
    """Return alembic's configuration, running on `connection` if one is given."""
    result = Config()
    result.set_main_option("script_location", str(Path(__file__).parent).replace("%", "%%"))
    result.set_main_option("path_separator", "os")
    result.attributes["connection"] = connection
    return result


async def migrate(url: str) -> None:
    """Bring the database at `url` to the newest revision; one that is there already is left as it is."""
    engine = sql.connect(url)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_upgrade)
            await connection.commit()
    finally:
        await engine.dispose()


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    command.upgrade(config(connection), "head")
