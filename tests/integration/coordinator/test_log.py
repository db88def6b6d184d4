"""The log as the coordinator reads it from a real NATS: every message once, in order, whatever happens to the server."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError
from rlharvest.bus import LEDGER, subject
from rlharvest.supervise import cancel
from rlharvest.testing.servers import NatsServer
from rlharvest.v1 import ledger_pb2
from rlharvest_coordinator.log import Entry, Log, StreamChanged

JOB = "rljob_test"


@pytest.fixture
async def log(nats: Client) -> AsyncIterator[Log]:
    found = Log(nats)
    await found.open()
    await found.start(0)
    yield found
    await found.close()


async def publish(nats: Client, number: int) -> None:
    """Publish one message until NATS has it, as a worker does."""
    js = nats.jetstream(timeout=1)
    while True:
        try:
            headers = {"Nats-Msg-Id": f"w:{number}"}
            await js.publish(subject("spans", JOB, "w"), str(number).encode(), headers=headers, stream=LEDGER)
            return
        except (TimeoutError, NatsError, APIError):
            await asyncio.sleep(0.05)


async def publish_all(nats: Client, numbers: range) -> None:
    for number in numbers:
        await publish(nats, number)


async def read(log: Log, n: int, *, timeout_s: float = 30.0) -> list[Entry]:
    """Read until there are n entries."""
    entries: list[Entry] = []
    async with asyncio.timeout(timeout_s):
        while len(entries) < n:
            entries += await log.read()
    return entries


async def test_an_entry_says_where_it_is_and_whose_it_is(nats: Client, log: Log) -> None:
    await publish(nats, 1)
    (entry,) = await read(log, 1)
    assert entry == Entry(1, "spans", JOB, "w", b"1")
    assert log.delivered == 1


async def test_silence_is_an_empty_list(log: Log) -> None:
    assert await asyncio.wait_for(log.read(), 10) == []


@pytest.mark.slow
async def test_no_message_is_missing_doubled_or_out_of_order_when_nats_is_killed(
    nats: Client, nats_server: NatsServer, log: Log
) -> None:
    """SIGKILL in the middle of publishing and reading, restarted on its files, twice."""
    publishing = asyncio.create_task(publish_all(nats, range(300)))
    entries: list[Entry] = []
    for until in (60, 140):
        entries += await read(log, until - len(entries))
        await asyncio.to_thread(nats_server.kill)
        await asyncio.sleep(0.2)
        await asyncio.to_thread(nats_server.start)
    entries += await read(log, 300 - len(entries), timeout_s=60)
    await publishing
    assert [entry.sequence for entry in entries] == list(range(1, 301))
    assert [int(entry.data) for entry in entries] == list(range(300))


async def test_a_reader_goes_on_where_another_one_stopped(nats: Client, log: Log) -> None:
    await publish_all(nats, range(10))
    await read(log, 10)
    later = Log(nats)
    await later.open()
    await later.start(7)
    assert [entry.sequence for entry in await read(later, 3)] == [8, 9, 10]
    await later.close()


@pytest.mark.slow
async def test_a_stream_that_comes_back_empty_is_found_by_its_identity(
    nats: Client, nats_server: NatsServer, log: Log
) -> None:
    """NATS lost its files: StreamChanged, and after open and start the new stream is read from its beginning."""
    await publish_all(nats, range(5))
    await read(log, 5)
    before = log.identity
    nats_server.kill()
    shutil.rmtree(nats_server.directory / "jetstream")
    nats_server.start()
    with pytest.raises(StreamChanged) as caught:
        await read(log, 1)
    assert caught.value.identity != before
    await log.open()
    assert log.identity == caught.value.identity
    await log.start(0)
    await publish_all(nats, range(5, 8))
    assert [(entry.sequence, entry.data) for entry in await read(log, 3)] == [(1, b"5"), (2, b"6"), (3, b"7")]


async def test_a_stream_that_was_made_anew_is_found_too(nats: Client, log: Log) -> None:
    """Somebody deleted it: the same as new files."""
    await publish(nats, 1)
    await read(log, 1)
    await nats.jetstream().delete_stream(LEDGER)
    with pytest.raises(StreamChanged):
        await read(log, 1)


async def test_what_was_purged_is_no_gap(nats: Client, log: Log) -> None:
    """A reader that starts before the first message that is left begins with that one."""
    await publish_all(nats, range(10))
    await log.purge(6)
    later = Log(nats)
    await later.open()
    await later.start(0)
    assert [entry.sequence for entry in await read(later, 5)] == [6, 7, 8, 9, 10]
    await later.close()


async def test_a_transition_that_is_published_again_is_in_the_log_once(nats: Client, log: Log) -> None:
    """Its epoch and number are its identity; another epoch's is another one."""
    transition = ledger_pb2.Transition(epoch=1, number=7)
    first = await log.publish(JOB, transition)
    assert await log.publish(JOB, transition) == first
    assert await log.publish(JOB, ledger_pb2.Transition(epoch=2, number=7)) == first + 1
    assert [entry.kind for entry in await read(log, 2)] == ["ledger", "ledger"]


@pytest.mark.slow
async def test_a_transition_waits_for_nats_and_is_then_in_the_log_once(
    nats: Client, nats_server: NatsServer, log: Log
) -> None:
    """Published while NATS is away: tried until it is durable."""
    nats_server.kill()
    publishing = asyncio.create_task(log.publish(JOB, ledger_pb2.Transition(epoch=1, number=1)))
    await asyncio.sleep(1.0)
    assert not publishing.done()
    await asyncio.to_thread(nats_server.start)
    assert await asyncio.wait_for(publishing, 30) == 1
    await publish(nats, 1)
    entries = await read(log, 2)
    assert [entry.kind for entry in entries] == ["ledger", "spans"]
    await cancel([publishing])
