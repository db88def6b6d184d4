"""A worker process against a real NATS, a small coordinator and a small weight server."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from rlharvest.testing.coordinator import FakeCoordinator
from rlharvest.testing.servers import NatsServer
from rlharvest.weights.manifest import Manifest, describe

JOB = "rljob_test"


class WeightServer:
    """Serves versions that hold one small file each; whole files only, which the puller must cope with."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.directory.mkdir()
        self.paths: dict[str, bytes] = {}
        self.broken: set[str] = set()
        """Paths that are answered with 404."""
        self.asked: Counter[str] = Counter()
        """How often each path was asked for."""
        self.open = threading.Event()
        """Cleared: blobs are answered when it is set again."""
        self.open.set()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                owner.asked[self.path] += 1
                if self.path.startswith("/v1/blobs/"):
                    owner.open.wait()
                body = None if self.path in owner.broken else owner.paths.get(self.path)
                self.send_response(404 if body is None else 200)
                self.send_header("Content-Length", str(len(body or b"")))
                self.end_headers()
                self.wfile.write(body or b"")

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def publish(self, version: int) -> None:
        path = self.directory / "config.json"
        path.write_text(f'{{"version": {version}}}')
        entry = describe(path)
        manifest = Manifest(job=JOB, version=version, step=version, files=(entry,))
        self.paths[f"/v1/blobs/{entry.blake3}"] = path.read_bytes()
        self.paths[f"/v1/jobs/{JOB}/versions/{version}"] = manifest.model_dump_json().encode()

    def close(self) -> None:
        self.open.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class WorkerProcess:
    """`rlharvest-rollout serve` as a child."""

    def __init__(self, directory: Path, coordinator: FakeCoordinator, nats: NatsServer, **settings: object) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self.log = directory / "worker.log"
        environment = {
            **os.environ,
            "RLHARVEST_NATS_URL": nats.url,
            "RLHARVEST_COORDINATOR_GRPC": coordinator.grpc_address,
            "RLHARVEST_DATA_DIR": str(directory),
            "RLHARVEST_ENGINES": "stub",
            "RLHARVEST_PROBE_S": "0.3",
            **{f"RLHARVEST_{name.upper()}": str(value) for name, value in settings.items()},
        }
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", "from rlharvest_rollout.main import main; main()", "serve"],
                env=environment,
                stdout=output,
                stderr=output,
                stdin=subprocess.DEVNULL,
            )

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    async def exit_code(self, timeout_s: float = 10.0) -> int:
        return await asyncio.to_thread(self.process.wait, timeout_s)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.kill()


class World:
    """Everything that a test needs; makes workers."""

    def __init__(self, directory: Path, nats: NatsServer, coordinator: FakeCoordinator, weights: WeightServer) -> None:
        self.directory = directory
        self.nats = nats
        self.coordinator = coordinator
        self.weights = weights
        self.processes: list[WorkerProcess] = []

    def start(self, **settings: object) -> WorkerProcess:
        """Start a worker."""
        number = len(self.processes)
        process = WorkerProcess(self.directory / f"worker{number}", self.coordinator, self.nats, **settings)
        self.processes.append(process)
        return process

    async def join(self, *, stub: dict[str, object] | None = None, **settings: object) -> tuple[str, WorkerProcess]:
        """Start a worker and lease it to the job at version 0, or later if that is published; return its name."""
        process = self.start(**settings)
        name = await self.coordinator.worker(len(self.processes))
        reply = await self.lease(name, stub=stub)
        assert reply.accepted, reply.reason
        await self.coordinator.ready(name)
        return name, process

    async def lease(self, name: str, version: int = 0, *, stub: dict[str, object] | None = None):
        options = {"vocab": 100, "eos_id": 0, "step_s": 0.005, **(stub or {})}
        for _ in range(500):
            reply = await self.coordinator.lease(
                name, weights_url=self.weights.url, version=version, rollout={"engine": "stub", "stub": options}
            )
            if reply.reason != "not joined":
                return reply
            await asyncio.sleep(0.02)
        raise AssertionError("the worker never joined")


@pytest.fixture
def weight_server(tmp_path: Path) -> Iterator[WeightServer]:
    server = WeightServer(tmp_path / "weights")
    server.publish(0)
    yield server
    server.close()


@pytest.fixture
async def world(tmp_path: Path, nats_server: NatsServer, weight_server: WeightServer) -> AsyncIterator[World]:
    coordinator = FakeCoordinator(nats_server.url, JOB)
    await coordinator.start()
    made = World(tmp_path, nats_server, coordinator, weight_server)
    yield made
    for process in made.processes:
        process.stop()
    await coordinator.close()
