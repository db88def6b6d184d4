"""A reader that does not keep up: what it was not given is counted and told, and nothing else suffers from it."""

from __future__ import annotations

import asyncio

from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.testing.servers import NatsServer
from structlog.testing import capture_logs

BURST, ROOM = 5_000, 10


async def test_a_slow_reader_is_told_in_one_line_and_holds_nobody_up(nats_server: NatsServer) -> None:
    """The client throws away what its reader has no room for, without a word to the reader."""
    stuck, heard, read = asyncio.Event(), asyncio.Event(), asyncio.Event()
    given = 0

    async def slow(_message: Msg) -> None:
        nonlocal given
        await stuck.wait()
        given += 1
        if given == ROOM:
            read.set()

    async def quick(_message: Msg) -> None:
        heard.set()

    with capture_logs() as lines:
        client = await bus.connect(nats_server.url, "test")
        await client.subscribe("slow", cb=slow, pending_msgs_limit=ROOM)
        await client.subscribe("quick", cb=quick)
        for _ in range(BURST):
            await client.publish("slow", b"x")
        await client.publish("quick", b"x")
        async with asyncio.timeout(60):
            await heard.wait()
        await bus.ensure_streams(client.jetstream())  # what must not be lost goes another way, which is open
        stuck.set()
        async with asyncio.timeout(60):
            await read.wait()
        await client.close()
    errors = [line for line in lines if line["event"] == "nats.error"]
    assert ROOM <= given < BURST, "some were dropped"
    assert len(errors) == 1, "one line, however many were dropped"
    assert "SlowConsumer" in errors[0]["error"]
    assert errors[0]["times"] == 1, "it is said at once"
