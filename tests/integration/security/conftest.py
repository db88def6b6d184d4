"""Real servers that ask who one is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rlharvest.keyring import Keyring
from rlharvest.testing.servers import NatsServer, ValkeyServer


@pytest.fixture(scope="module")
def keyring(tmp_path_factory: pytest.TempPathFactory) -> Keyring:
    made = Keyring(tmp_path_factory.mktemp("secrets"))
    made.make()
    return made


@pytest.fixture(scope="module")
def nats(tmp_path_factory: pytest.TempPathFactory, keyring: Keyring) -> Iterator[NatsServer]:
    server = NatsServer(tmp_path_factory.mktemp("nats"), keyring)
    server.start()
    yield server
    server.stop()


@pytest.fixture(scope="module")
def valkey(tmp_path_factory: pytest.TempPathFactory, keyring: Keyring) -> Iterator[ValkeyServer]:
    server = ValkeyServer(tmp_path_factory.mktemp("valkey"), keyring)
    server.start()
    yield server
    server.stop()


@pytest.fixture
def secrets(keyring: Keyring) -> Path:
    """Directory of the coordinator's secrets."""
    return keyring.holder("coordinator")
