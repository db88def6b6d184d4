"""The application on a SQLite file, with a fake of the part that runs jobs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from fastapi import FastAPI
from rlharvest.credentials import Tokens
from rlharvest.errors import NotFound
from rlharvest.health import Health
from rlharvest.testing.servers import free_port
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.api.app import create_app
from rlharvest_coordinator.api.server import config
from rlharvest_coordinator.live import LiveJob, LiveWorker
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions


@dataclass
class FakeLive:
    """Implements rlharvest_coordinator.live.LiveView; a test fills it and reads what was asked."""

    leading: bool = True
    epoch: int = 1
    running: dict[str, LiveJob] = field(default_factory=dict)
    here: list[LiveWorker] = field(default_factory=list)
    samples: dict[tuple[str, int], dict[str, Any]] = field(default_factory=dict)
    woken: list[str] = field(default_factory=list)
    drained: list[tuple[str, str]] = field(default_factory=list)

    def job(self, job: str) -> LiveJob | None:
        return self.running.get(job)

    def workers(self) -> list[LiveWorker]:
        return self.here

    async def drain(self, worker: str, reason: str) -> None:
        if all(known.id != worker for known in self.here):
            raise NotFound(f"there is no worker {worker!r}")
        self.drained.append((worker, reason))

    async def live_sample(self, job: str, handle: int) -> dict[str, Any] | None:
        return self.samples.get((job, handle))

    async def live_samples(self, job: str, limit: int) -> list[dict[str, Any]]:
        return [sample for (owner, _), sample in self.samples.items() if owner == job][:limit]

    def wake(self, job: str) -> None:
        self.woken.append(job)


def spec(**changes: Any) -> dict[str, Any]:
    """A small job."""
    return {
        "model": "m",
        "dataset": {"path": "d.jsonl"},
        "rewards": [{"builtin": "exact_match"}],
        "limits": {"max_steps": 10},
        **changes,
    }


@pytest.fixture
def live() -> FakeLive:
    return FakeLive()


@pytest.fixture
async def sessions(tmp_path: Path) -> AsyncIterator[Sessions]:
    url = f"sqlite+aiosqlite:///{tmp_path / 'api.sqlite3'}"
    await migrations.migrate(url)
    engine = sql.connect(url)
    yield sql.sessions(engine)
    await engine.dispose()


MakeApp = Callable[..., FastAPI]


@pytest.fixture
def make_app(sessions: Sessions, live: FakeLive, tmp_path: Path) -> MakeApp:
    """Make an application; keyword arguments go to create_app."""

    def make(token: str | None = None, **arguments: Any) -> FastAPI:
        settings = CoordinatorSettings(data_dir=tmp_path, api_token=Tokens([token]) if token else None)
        return create_app(settings, sessions, live, Health(), **arguments)

    return make


@pytest.fixture
async def client(make_app: MakeApp) -> AsyncIterator[httpx.AsyncClient]:
    """Calls the application in this process."""
    transport = httpx.ASGITransport(make_app(), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield http


class Served:
    """An application behind uvicorn in a thread of its own, so that blocking clients can be tested."""

    def __init__(self, directory: Path, live: FakeLive, *, token: str | None = None) -> None:
        self.url = ""
        self.database = f"sqlite+aiosqlite:///{directory / 'served.sqlite3'}"
        self._directory = directory
        self._live = live
        self._token = token
        self._loop: asyncio.AbstractEventLoop | None = None
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None
        self.sessions: Sessions | None = None
        self.port = 0

    def start(self) -> None:
        """Serve, on the port it had before if it was served before."""
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self._thread.start()
        end = time.monotonic() + 10
        while not (self._server is not None and self._server.started):
            assert time.monotonic() < end
            time.sleep(0.01)

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        await migrations.migrate(self.database)
        engine = sql.connect(self.database)
        self.sessions = sql.sessions(engine)
        settings = CoordinatorSettings(
            weights_url=f"http://127.0.0.1:{free_port()}",
            data_dir=self._directory,
            api_token=Tokens([self._token]) if self._token else None,
        )
        stopping = asyncio.Event()
        self._stopping = stopping
        app = create_app(settings, self.sessions, self._live, Health(), stopping=stopping)
        server = uvicorn.Server(config(app, timeout_graceful_shutdown=2))
        with socket.socket() as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", self.port))
            self.port = listening.getsockname()[1]
            self.url = f"http://127.0.0.1:{self.port}"
            self._server = server
            await server.serve(sockets=[listening])
        await engine.dispose()

    def run(self, coroutine: Any) -> Any:
        """Run a coroutine on the server's loop."""
        assert self._loop is not None
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    def stop(self) -> None:
        """Stop serving; streams end."""
        if self._server is None or self._loop is None or self._thread is None:
            return
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._stopping.set)
        self._server.should_exit = True
        self._thread.join(10)
        assert not self._thread.is_alive()
        self._server = None


@pytest.fixture
def served(tmp_path: Path, live: FakeLive) -> Iterator[Served]:
    """The application on a port."""
    server = Served(tmp_path, live)
    server.start()
    yield server
    server.stop()
