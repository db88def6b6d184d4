"""The weight service as a process of its own."""

from __future__ import annotations

import http.client
import json
import random
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from rlharvest.testing.servers import Child, free_port


class WeightService(Child):
    """`rlharvest-weights serve` on free ports, restarted on the same files and ports."""

    name = "rlharvest-weights"
    program = "from rlharvest_weights.main import main; main()"

    def __init__(self, directory: Path, **settings: object) -> None:
        super().__init__(directory)
        self.grpc_port = free_port()
        self.settings = settings

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def grpc(self) -> str:
        return f"127.0.0.1:{self.grpc_port}"

    @property
    def files(self) -> Path:
        return self.directory / "weights"

    def command(self) -> list[str]:
        variables = {
            "http_port": self.port,
            "grpc_address": self.grpc,
            "data_dir": self.directory,
            "nats_url": "nats://127.0.0.1:1",
            "min_free_bytes": 0,
            **self.settings,
        }
        pairs = [f"RLHARVEST_{name.upper()}={value}" for name, value in variables.items()]
        return ["env", *pairs, sys.executable, "-c", self.program, "serve"]

    def healthy(self) -> bool:
        try:
            return self.request("GET", "/livez")[0] == 200
        except OSError:
            return False

    def request(
        self, method: str, path: str, *, body: bytes | None = None, headers: dict[str, str] | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """Return (status, headers in lower case, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, body=body, headers=headers or {})
            reply = connection.getresponse()
            return reply.status, {name.lower(): value for name, value in reply.getheaders()}, reply.read()
        finally:
            connection.close()


@pytest.fixture
def start_service(tmp_path: Path) -> Iterator[Callable[..., WeightService]]:
    """Starts a weight service, without NATS, with the settings given."""
    started: list[WeightService] = []

    def start(**settings: object) -> WeightService:
        server = WeightService(tmp_path / "service", **settings)
        server.start()
        started.append(server)
        return server

    yield start
    for server in started:
        server.stop()


@pytest.fixture
def service(start_service: Callable[..., WeightService]) -> WeightService:
    """A weight service with default settings."""
    return start_service()


@pytest.fixture(scope="module")
def shared_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WeightService]:
    """A weight service for all tests of a module, which may not stop it."""
    server = WeightService(tmp_path_factory.mktemp("service"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def model_directory(tmp_path: Path) -> Callable[..., Path]:
    """Makes directories with a small safetensors file, a config and a tokenizer."""

    def make(name: str, *, seed: int, size: int = 300_000) -> Path:
        directory = tmp_path / name
        directory.mkdir()
        (directory / "model.safetensors").write_bytes(safetensors_bytes(random.Random(seed).randbytes(size)))
        (directory / "config.json").write_text('{"model_type": "test"}')
        (directory / "tokenizer.json").write_text("{}")
        return directory

    return make


def safetensors_bytes(data: bytes) -> bytes:
    """Return a safetensors file with one U8 tensor."""
    header = json.dumps({"t": {"dtype": "U8", "shape": [len(data)], "data_offsets": [0, len(data)]}}).encode()
    return struct.pack("<Q", len(header)) + header + data
