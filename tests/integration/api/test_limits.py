"""What the API bounds: one clear refusal each, and everything else goes on."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from rlharvest.health import Health
from rlharvest_coordinator import migrations, sql
from rlharvest_coordinator.api.app import create_app
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions
from sqlalchemy import event

from .conftest import FakeLive, Served, spec


@pytest.fixture
async def tight(sessions: Sessions, live: FakeLive, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    """An application in which little is allowed."""
    settings = CoordinatorSettings(data_dir=tmp_path, most_jobs=2, most_streams=1)
    transport = httpx.ASGITransport(create_app(settings, sessions, live, Health()), raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        yield http


async def test_more_unfinished_jobs_than_allowed_are_refused_until_one_ends(tight: httpx.AsyncClient) -> None:
    first, _ = [(await tight.post("/v1/jobs", json=spec())).json()["id"] for _ in range(2)]
    reply = await tight.post("/v1/jobs", json=spec())
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "limit_reached")
    assert "unfinished jobs: the limit of 2 is reached" in reply.json()["error"]["message"]
    assert "RLHARVEST_MOST_JOBS" in reply.json()["error"]["message"]
    assert reply.headers["retry-after"]
    await tight.post(f"/v1/jobs/{first}/cancel")
    assert (await tight.post("/v1/jobs", json=spec())).status_code == 201


async def test_a_replay_of_a_known_key_is_no_new_job(tight: httpx.AsyncClient) -> None:
    keys = [(await tight.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": key})) for key in ("a", "b", "a")]
    assert [reply.status_code for reply in keys] == [201, 201, 200]


@pytest.mark.parametrize("key", ["k" * 256, ""])
async def test_a_key_is_bounded(client: httpx.AsyncClient, key: str) -> None:
    reply = await client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": key})
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "Idempotency-Key")
    assert "255" in reply.json()["error"]["message"]


async def test_pages_and_curves_are_bounded(client: httpx.AsyncClient) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    for path, field in (
        ("/v1/jobs?limit=1001", "limit"),
        ("/v1/workers?limit=1001", "limit"),
        (f"/v1/jobs/{job}/events?limit=1001", "limit"),
        (f"/v1/jobs/{job}/samples?limit=1001", "limit"),
        (f"/v1/jobs/{job}/metrics?max_points=100001", "max_points"),
        (f"/v1/jobs/{job}/metrics?names=" + "n" * 16385, "names"),
    ):
        reply = await client.get(path)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, field), path
    assert (await client.get(f"/v1/jobs/{job}/metrics")).status_code == 200


async def test_a_number_of_thousands_of_digits_is_refused(client: httpx.AsyncClient) -> None:
    """Python's own limit on them is no JSON error."""
    for kind in ("application/json", "application/yaml"):
        body = b'{"model": ' + b"9" * 5000 + b"}"
        reply = await client.post("/v1/jobs", content=body, headers={"Content-Type": kind})
        assert (reply.status_code, reply.json()["error"]["code"]) == (400, "invalid_value")


def exchange(served: Served, *parts: bytes) -> tuple[bytes, dict[str, Any]]:
    """Send bytes in pieces; return the status line and the error of the answer, read to its end."""
    with socket.create_connection(("127.0.0.1", served.port), timeout=30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for part in parts:
            connection.sendall(part)
        answer = b""
        while data := connection.recv(65536):
            answer += data
    head, _, body = answer.partition(b"\r\n\r\n")
    return head.split(b"\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize("size", [1 << 16, 1 << 23])
def test_a_head_over_the_limit_is_answered_by_name_however_it_arrives(served: Served, size: int) -> None:
    """In the target or a header, at once or in pieces, read by the server in time or closed upon: never a bare reset."""
    close = b"Host: 127.0.0.1\r\nConnection: close\r\n"
    long = b"x" * size
    for head in (
        b"GET /v1/jobs?after=" + long + b" HTTP/1.1\r\n" + close + b"\r\n",
        b"GET /v1/jobs HTTP/1.1\r\n" + close + b"Cookie: " + long + b"\r\n\r\n",
    ):
        for parts in ((head,), (head[:1000], head[1000:-2], head[-2:])):
            first, error = exchange(served, *parts)
            assert first.startswith(b"HTTP/1.1 431 ")
            assert (error["code"], error["type"]) == ("head_too_large", "invalid_request_error")
            assert str(1 << 16) in error["message"]
            assert "body" in error["message"], "the fix"
    assert httpx.get(f"{served.url}/v1/jobs").status_code == 200


async def test_a_head_that_comes_whole_has_the_same_limit(client: httpx.AsyncClient) -> None:
    for size, status in ((60_000, 200), (1 << 16, 431)):
        assert (await client.get("/v1/jobs", headers={"X-Long": "x" * size})).status_code == status


@pytest.mark.parametrize(
    "request_",
    [
        b"no request at all\r\n\r\n",
        b"GET /v1/jobs HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /v1/jobs HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nno chunk\r\n",
    ],
)
def test_what_is_no_http_is_answered_as_everything_else(served: Served, request_: bytes) -> None:
    first, error = exchange(served, request_)
    assert first.startswith(b"HTTP/1.1 400 ")
    assert (error["code"], error["type"]) == ("bad_request", "invalid_request_error")


def open_stream(served: Served, job: str, *, last: bool = False) -> socket.socket:
    """Ask for a job's events as a stream; return the connection, on which nothing was read yet."""
    connection = socket.create_connection(("127.0.0.1", served.port), timeout=30)
    request = f"GET /v1/jobs/{job}/events HTTP/1.1\r\nHost: 127.0.0.1\r\nAccept: text/event-stream\r\n\r\n"
    connection.sendall(request.encode())
    return connection


def status(connection: socket.socket) -> bytes:
    return connection.recv(4096)


def test_a_stream_too_many_is_refused_with_retry_after_and_places_come_back(
    tmp_path: Path, live: FakeLive, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLHARVEST_MOST_STREAMS", "2")
    served = Served(tmp_path, live)
    served.start()
    try:
        job = httpx.post(f"{served.url}/v1/jobs", json=spec()).json()["id"]
        held = [open_stream(served, job) for _ in range(2)]
        assert all(status(connection).startswith(b"HTTP/1.1 200") for connection in held)
        refused = httpx.get(f"{served.url}/v1/jobs/{job}/events", headers={"Accept": "text/event-stream"})
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
        assert "event streams: the limit of 2 is reached" in refused.json()["error"]["message"]
        assert httpx.get(f"{served.url}/v1/jobs/{job}/events").status_code == 200, "pages are still served"
        held.pop().close()
        for _ in range(200):
            again = open_stream(served, job)
            if status(again).startswith(b"HTTP/1.1 200"):
                held.append(again)
                break
            again.close()
        assert len(held) == 2, "the place of a client that went away never came back"
        for connection in held:
            connection.close()
    finally:
        served.stop()


async def test_a_full_database_refuses_what_changes_it_and_answers_the_rest(live: FakeLive, tmp_path: Path) -> None:
    """SQLite's own limit of pages stands for the disk: the same fault, SQLITE_FULL."""
    url = f"sqlite+aiosqlite:///{tmp_path / 'full.sqlite3'}"
    await migrations.migrate(url)
    engine = sql.connect(url)
    most = [1 << 30]

    @event.listens_for(engine.sync_engine, "begin")
    def limit(connection: object) -> None:
        connection.exec_driver_sql(f"PRAGMA max_page_count={most[0]}")  # type: ignore[attr-defined]  # of any dialect

    app = create_app(CoordinatorSettings(data_dir=tmp_path), sql.sessions(engine), live, Health())
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as http:
        job = (await http.post("/v1/jobs", json=spec())).json()["id"]
        most[0] = 1
        large = spec(metadata={str(key): "v" * 512 for key in range(64)})
        reply = await http.post("/v1/jobs", json=large)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "database_full")
        assert "Nothing was changed" in reply.json()["error"]["message"]
        assert (await http.get(f"/v1/jobs/{job}")).status_code == 200
        most[0] = 1 << 30
        assert (await http.post("/v1/jobs", json=large)).status_code == 201
    await asyncio.shield(engine.dispose())


async def test_a_job_that_is_deleted_says_where_its_checkpoints_are_or_takes_them_along(
    client: httpx.AsyncClient, tmp_path: Path
) -> None:
    for asked, there in ((False, True), (True, False)):
        job = (await client.post("/v1/jobs", json=spec())).json()["id"]
        await client.post(f"/v1/jobs/{job}/cancel")
        directory = tmp_path / "checkpoints" / job / "step_1"
        directory.mkdir(parents=True)
        reply = await client.delete(f"/v1/jobs/{job}", params={"checkpoints": asked})
        assert reply.json()["checkpoints"] == (str(directory.parent) if there else None)
        assert directory.exists() is there
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    await client.post(f"/v1/jobs/{job}/cancel")
    assert (await client.delete(f"/v1/jobs/{job}")).json()["checkpoints"] is None
