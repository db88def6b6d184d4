"""Health and metrics of a process without a web server."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator

import pytest
from rlharvest.errors import InvalidField
from rlharvest.health import Health, HealthServer


@pytest.fixture
async def server() -> AsyncIterator[HealthServer]:
    running = HealthServer(Health())
    await running.start("127.0.0.1", 0)
    yield running
    await running.close()


async def ask(server: HealthServer, request: bytes) -> tuple[int, str]:
    """Send a request as it is; return status and body."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(request)
    await writer.drain()
    answer = (await asyncio.wait_for(reader.read(), 10)).decode()
    writer.close()
    await writer.wait_closed()
    head, _, body = answer.partition("\r\n\r\n")
    return int(head.split()[1]), body


async def get(server: HealthServer, path: str) -> tuple[int, str]:
    return await ask(server, f"GET {path} HTTP/1.1\r\nHost: x\r\n\r\n".encode())


async def test_a_process_that_turns_is_alive(server: HealthServer) -> None:
    assert await get(server, "/livez") == (200, '{"status": "ok"}')


async def test_what_is_not_ready_is_named_with_its_sentence(server: HealthServer) -> None:
    async def fine() -> None:
        return None

    async def away() -> str:
        return "not connected to nats://127.0.0.1:1"

    async def broken() -> str:
        raise OSError("no route")

    server.health.checks |= {"sql": fine}
    assert (await get(server, "/readyz"))[0] == 200
    server.health.checks |= {"nats": away, "redis": broken}
    status, body = await get(server, "/readyz?verbose=1")
    assert status == 503
    assert json.loads(body)["failed"] == {
        "nats": "not connected to nats://127.0.0.1:1",
        "redis": "OSError('no route')",
    }


async def test_a_check_that_hangs_is_not_ready() -> None:
    health = Health()

    async def hangs() -> str | None:
        await asyncio.Event().wait()
        return None

    health.checks["store"] = hangs
    assert await health.failures(timeout_s=0.05) == {"store": "no answer in 0.05 s"}


async def test_metrics_are_in_the_text_format(server: HealthServer) -> None:
    status, body = await get(server, "/metrics")
    assert status == 200
    assert "# HELP python_info" in body


async def test_another_path_says_which_there_are(server: HealthServer) -> None:
    status, body = await get(server, "/secret")
    assert status == 404
    assert "/livez, /readyz, /metrics" in body


@pytest.mark.parametrize("request_", [b"\r\n\r\n", b"\xff\xfe\r\n\r\n", b"GET\r\n\r\n"])
async def test_what_is_no_request_harms_nobody(server: HealthServer, request_: bytes) -> None:
    status, _ = await ask(server, request_)
    assert status == 404
    assert (await get(server, "/livez"))[0] == 200


async def test_a_client_that_goes_away_harms_nobody(server: HealthServer) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.close()
    await writer.wait_closed()
    assert (await get(server, "/livez"))[0] == 200


async def test_a_port_in_use_is_one_clear_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(InvalidField, match="RLHARVEST_HEALTH_PORT") as caught:
            await HealthServer(Health()).start("127.0.0.1", port)
    assert caught.value.value == f"127.0.0.1:{port}"
    assert caught.value.fix
