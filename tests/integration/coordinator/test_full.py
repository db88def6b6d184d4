"""A stream and a store that take no more: who writes to them waits, says so by name, and has lost nothing afterwards."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from nats.aio.client import Client
from nats.errors import Error as NatsError
from redis.asyncio import Redis
from rlharvest import bus
from rlharvest.bus import LEDGER, STREAMS, ensure_streams
from rlharvest.ledger.store import Store
from rlharvest.supervise import cancel
from rlharvest.testing.servers import NatsServer
from rlharvest.v1 import ledger_pb2
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.log import Log

from .test_keeper import JOB, begin, keeping, length, send, tokens, until


async def resize(nats: Client, max_bytes: int) -> None:
    await nats.jetstream().update_stream(STREAMS[LEDGER].evolve(max_bytes=max_bytes))


async def test_a_transition_waits_for_room_in_the_stream_and_is_then_in_it_once(nats: Client) -> None:
    log = Log(nats)
    await log.open()
    await resize(nats, 1)
    publishing = asyncio.create_task(log.publish(JOB, ledger_pb2.Transition(epoch=1, number=1)))
    await until(lambda: log.obstacle is not None and log.obstacle.reason == "LedgerFull", "the stream to be full")
    assert not publishing.done()
    await log.measure()
    assert log.obstacle is not None
    assert "0 of 1 bytes" in log.obstacle.message
    await resize(nats, STREAMS[LEDGER].max_bytes or 0)
    assert await asyncio.wait_for(publishing, 30) == 1
    assert log.obstacle is None
    assert (await nats.jetstream().stream_info(LEDGER)).state.messages == 1
    await cancel([publishing])


async def test_a_full_stream_refuses_what_is_new_and_forgets_nothing(nats: Client) -> None:
    """discard: new. With discard: old the ledger would lose its beginning in silence."""
    await ensure_streams(nats.jetstream())
    await send(nats, tokens(0, 0, 1))
    await resize(nats, 1)
    with pytest.raises(NatsError):
        await send(nats, tokens(0, 1, 1))
    state = (await nats.jetstream().stream_info(LEDGER)).state
    assert (state.messages, state.first_seq) == (1, 1)


async def test_a_store_at_its_maxmemory_stops_the_keeper_by_name_and_nothing_is_skipped(
    nats: Client, store: Store
) -> None:
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        await send(nats, tokens(0, 0, 10))
        await until(lambda: length(keeper) == 10, "the first tokens")
        redis: Redis = store.redis
        await redis.config_set("maxmemory", "1")
        await send(nats, tokens(0, 10, 10))
        await until(lambda: _reason(keeper) == "LedgerStoreFull", "the keeper to say what it waits for")
        applied = (await store.position(JOB)).applied
        await send(nats, tokens(0, 20, 10))
        assert (await store.position(JOB)).applied == applied, "nothing is written by half"
        await redis.config_set("maxmemory", "0")
        await until(lambda: length(keeper) == 30, "all tokens")
        await until(lambda: keeper.obstacle is None, "the keeper to go on")
        await until_applied(store, keeper)
    async with keeping(nats, store, epoch=2) as other:
        assert length(other) == 30, "the store has what the keeper told"


def _reason(keeper: Keeper) -> str:
    return keeper.obstacle.reason if keeper.obstacle is not None else ""


async def until_applied(store: Store, keeper: Keeper) -> None:
    async with asyncio.timeout(30):
        while (await store.position(JOB)).applied < keeper.log.delivered:  # noqa: ASYNC110 - Valkey tells nobody
            await asyncio.sleep(0.01)


class SmallNats(NatsServer):
    """A server that may keep 256 MiB on its disk."""

    def command(self) -> list[str]:
        command = super().command()
        config = Path(command[-1])
        config.write_text(config.read_text().replace("jetstream {", "jetstream {\n  max_file_store: 256MB"))
        return command


async def test_a_small_disk_gets_smaller_streams_instead_of_none(tmp_path: Path) -> None:
    """JetStream sets all of a stream's bytes aside when it is made."""
    server = SmallNats(tmp_path / "nats")
    server.start()
    try:
        client = await bus.connect(server.url, "test")
        found = await ensure_streams(client.jetstream())
        sizes = {name: info.config.max_bytes or 0 for name, info in found.items()}
        assert sum(sizes.values()) <= 256 << 20
        assert all(size >= bus.LEAST_STREAM_BYTES for size in sizes.values()), sizes
        await client.close()
    finally:
        server.stop()
