"""Messages come as they are asked for: in order, bounded however long nobody takes them, and not at all once it says so."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from nats.aio.client import Client
from rlharvest.bus import LEDGER, ensure_streams, subject
from rlharvest_coordinator import feed as module
from rlharvest_coordinator.feed import BATCH, Feed, FeedBroken
from rlharvest_coordinator.log import Log

SUBJECT = subject("spans", "rljob_test", "w")


@pytest.fixture
async def feed(nats: Client) -> AsyncIterator[Feed]:
    await ensure_streams(nats.jetstream())
    found = Feed(nats, nats.jetstream(), LEDGER)
    await found.start(0)
    yield found
    await found.close()


async def publish(nats: Client, n: int, *, size: int = 1) -> None:
    js = nats.jetstream()
    for _ in range(n):
        await js.publish(SUBJECT, b"x" * size, stream=LEDGER)


async def take(feed: Feed, n: int) -> list[int]:
    """Return the sequences of the next n messages."""
    found: list[int] = []
    while len(found) < n:
        found += [message.metadata.sequence.stream for message in await feed.next(30)]
    return found


async def test_more_than_one_request_brings_come_in_order(nats: Client, feed: Feed) -> None:
    n = 2 * BATCH + 7
    await publish(nats, n)
    assert await take(feed, n) == list(range(1, n + 1))


async def test_a_reader_that_stands_still_is_sent_no_more_than_it_asked_for(nats: Client, feed: Feed) -> None:
    await publish(nats, 3 * BATCH)
    await nats.flush()
    await asyncio.sleep(0.5)
    assert len(await feed.next(30)) <= BATCH


async def test_silence_is_a_timeout_and_the_feed_goes_on(nats: Client, feed: Feed) -> None:
    with pytest.raises(TimeoutError):
        await feed.next(0.2)
    await publish(nats, 1)
    assert await take(feed, 1) == [1]


async def test_a_request_that_expires_or_is_full_of_bytes_is_followed_by_another(
    nats: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "EXPIRES_S", 0.2)
    monkeypatch.setattr(module, "BATCH_BYTES", 5000)
    await ensure_streams(nats.jetstream())
    feed = Feed(nats, nats.jetstream(), LEDGER)
    await feed.start(0)
    with pytest.raises(TimeoutError):
        await feed.next(0.6)
    await publish(nats, 9, size=2000)
    assert await take(feed, 9) == list(range(1, 10))
    await feed.close()


async def test_a_feed_whose_consumer_is_gone_says_so_and_the_log_goes_on(nats: Client, feed: Feed) -> None:
    js = nats.jetstream()

    async def remove_consumers() -> None:
        for consumer in await js.consumers_info(LEDGER):
            await js.delete_consumer(LEDGER, consumer.name)

    log = Log(nats)
    await log.open()
    await log.start(0)
    await remove_consumers()
    with pytest.raises(FeedBroken):
        await feed.next(30)
    await publish(nats, 3)
    sequences: list[int] = []
    async with asyncio.timeout(30):
        while len(sequences) < 3:
            sequences += [entry.sequence for entry in await log.read()]
    assert sequences == [1, 2, 3]
    await log.close()
