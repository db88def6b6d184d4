"""The schema of SQL, revision by revision (alembic, run from code: there is no alembic.ini).

Invariants: `migrate` may run in any number of processes at a time, one of them does the work; the tables after the last
revision are those of tables.py (a test compares them); there is no way down, so a revision's `downgrade` is `no_way_down`.
"""

from __future__ import annotations

from pathlib import Path

from alembic import command
from alembic.config import Config
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from rlharvest.errors import Conflict, InvalidField
from sqlalchemy import Connection, text
from sqlalchemy.ext.asyncio import AsyncEngine

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
    """Bring the database at `url` to the newest revision; one that is there already is left as it is.

    Raises:
        InvalidField: a newer version of rlharvest made its schema.
    """
    engine = sql.connect(url)
    try:
        async with engine.connect() as connection:
            await connection.run_sync(_upgrade)
            await connection.commit()
    finally:
        await engine.dispose()


async def require_newest(engine: AsyncEngine) -> None:
    """Raise InvalidField unless the database's schema is the one of this version."""
    async with engine.connect() as connection:
        found = await connection.run_sync(_revision)
    if found != ScriptDirectory.from_config(config()).get_current_head():
        raise InvalidField(
            "RLHARVEST_SQL_URL",
            engine.url.render_as_string(hide_password=True),
            f"its schema is at revision {found!r}, which is older than this version's",
            "Back it up, then run: rlharvest-coordinator migrate",
        )


def no_way_down() -> None:
    """Refuse: an older schema has no place for what a newer one holds."""
    raise Conflict("a schema is not downgraded. Restore a backup that the older version made")


def _upgrade(connection: Connection) -> None:
    if connection.dialect.name == "postgresql":
        connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _LOCK})
    else:
        connection.exec_driver_sql("BEGIN IMMEDIATE")
    _revision(connection)
    command.upgrade(config(connection), "head")


def _revision(connection: Connection) -> str | None:
    """Return the revision that a database is at, None for an empty one; raise InvalidField if it is not one of ours."""
    found = MigrationContext.configure(connection).get_current_revision()
    known = {script.revision for script in ScriptDirectory.from_config(config()).walk_revisions()}
    if found is not None and found not in known:
        raise InvalidField(
            "RLHARVEST_SQL_URL",
            connection.engine.url.render_as_string(hide_password=True),
            f"its schema is at revision {found!r}: a newer version of rlharvest made it",
            "Run that version, or restore a backup that this one made.",
        )
    return found
