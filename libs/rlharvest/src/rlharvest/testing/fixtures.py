"""pytest fixtures; put `pytest_plugins = ["rlharvest.testing.fixtures"]` into a conftest.py to have them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlharvest.testing.clock import FakeClock
from rlharvest.testing.servers import NatsServer, ValkeyServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A NATS server of this test's own."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def valkey_server(tmp_path: Path) -> Iterator[ValkeyServer]:
    """A Valkey server of this test's own."""
    server = ValkeyServer(tmp_path / "valkey")
    server.start()
    yield server
    server.stop()


@pytest.fixture
def fake_clock() -> FakeClock:
    """A clock that the test turns."""
    return FakeClock()


@contextmanager
def disk_of(path: Path, *, mebibytes: int) -> Iterator[Path]:
    """Mount a disk of this size, in memory, at a new directory; the test is skipped where this user may mount none."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={mebibytes}m", "none", str(path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a disk")
    try:
        yield path
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
