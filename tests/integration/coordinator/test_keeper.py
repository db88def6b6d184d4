"""The keeper of the books between a real NATS and a real Valkey: every message takes effect once, and is kept first."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
from nats.aio.client import Client
from redis.exceptions import ConnectionError as RedisConnectionError
from rlharvest.bus import LEDGER, subject
from rlharvest.errors import Fenced
from rlharvest.ledger.record import Effects
from rlharvest.ledger.response import attempt_of
from rlharvest.ledger.store import Position, Store
from rlharvest.spans import Flush, Run, Span, pack
from rlharvest.supervise import cancel
from rlharvest.testing.servers import NatsServer, ValkeyServer
from rlharvest.v1 import ledger_pb2, scores_pb2, spans_pb2
from rlharvest_coordinator import keeper as module
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.log import Entry, Log

JOB = "rljob_test"
ATTEMPT = attempt_of(1, 1)


class Heard:
    """Notes what a keeper tells, and what the store had by then."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.sequences: list[int] = []
        self.early: list[int] = []

    async def __call__(self, job: str, entries: Sequence[tuple[Entry, Effects]]) -> None:
        stored = (await self.store.position(job)).applied
        for entry, _ in entries:
            self.sequences.append(entry.sequence)
            if entry.sequence > stored:
                self.early.append(entry.sequence)


@asynccontextmanager
async def keeping(nats: Client, store: Store, *, epoch: int, jobs: Sequence[str] = (JOB,)) -> AsyncIterator[Keeper]:
    """A keeper at work."""

    async def next_epoch() -> int:
        return keeper.epoch + 1

    log = Log(nats)
    keeper = Keeper(log, store, epoch, next_epoch)
    await keeper.start(jobs)
    running = asyncio.create_task(keeper.run())
    try:
        yield keeper
    finally:
        await cancel([running])
        await log.close()


async def until(true: Callable[[], object], what: str, *, timeout_s: float = 30.0) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not true():  # noqa: ASYNC110 - the keeper tells nobody of what it ignores
                await asyncio.sleep(0.01)
    except TimeoutError:
        raise AssertionError(f"not in {timeout_s:g} s: {what}") from None


async def begin(keeper: Keeper, *, groups: int = 1) -> None:
    """Admit groups of two and give them to a worker."""
    changes = []
    for group in range(groups):
        admit = ledger_pb2.Admit(group=group, first_handle=2 * group, n=2, budget=1000)
        changes.append(ledger_pb2.Change(admit=admit))
        for handle in (2 * group, 2 * group + 1):
            assign = ledger_pb2.Assign(handle=handle, attempt=ATTEMPT, worker="wkr_1", incarnation=1)
            changes.append(ledger_pb2.Change(assign=assign))
    await keeper.propose(JOB, changes)
    await until(lambda: len(keeper.books[JOB].responses) == 2 * groups, "the groups to be admitted")


def tokens(handle: int, offset: int, n: int) -> bytes:
    span = Span(
        handle=handle,
        attempt=ATTEMPT,
        offset=offset,
        ids=np.arange(offset, offset + n, dtype=np.uint32),
        logprobs=np.full(n, -1.0, np.float32),
        runs=(Run(n, 0),),
    )
    return pack(Flush(worker="wkr_1", incarnation=1, number=offset, spans=(span,)))


async def send(nats: Client, data: bytes, *, job: str = JOB, kind: Any = "spans", who: str = "wkr_1") -> int:
    return (await nats.jetstream().publish(subject(kind, job, who), data, stream=LEDGER)).seq


def length(keeper: Keeper, handle: int = 0) -> int:
    return keeper.books[JOB].responses[handle].length


async def test_a_message_is_in_the_store_before_anyone_hears_of_it(nats: Client, store: Store) -> None:
    async with keeping(nats, store, epoch=1) as keeper:
        heard = Heard(store)
        keeper.listen(heard)
        await begin(keeper)
        for offset in range(0, 50, 5):
            await send(nats, tokens(0, offset, 5))
        await until(lambda: length(keeper) == 50, "all tokens")
        await until(lambda: len(heard.sequences) >= 11, "all to be told")
    assert heard.sequences == sorted(set(heard.sequences))
    assert heard.early == []


@pytest.mark.parametrize("cut", [0, 3, 17, 40])
async def test_everything_is_applied_exactly_once_across_a_restart(nats: Client, store: Store, cut: int) -> None:
    """A keeper is cut down in the middle; the next one, in the next epoch, goes on from the store."""
    async with keeping(nats, store, epoch=1) as first:
        await begin(first)
        for offset in range(0, 200, 4):
            await send(nats, tokens(0, offset, 4))
        await until(lambda: length(first) >= 4 * cut, "some tokens")
    async with keeping(nats, store, epoch=2) as second:
        await until(lambda: length(second) == 200, "all tokens")
        book = second.books[JOB]
        assert book.responses[0].ids.tolist() == list(range(200))
        assert book.counters["generated_tokens"] == 200
        assert book.counters["duplicate_tokens"] == 0
        assert book.responses[0].attempt == ATTEMPT, "an attempt was taken from its owner"
        await until(lambda: second.books[JOB].epoch == 2, "the begin of the new epoch")


async def test_a_keeper_of_a_lower_epoch_is_fenced(nats: Client, store: Store) -> None:
    """The old one, still running when its successor has begun, stops at its next write."""
    async with keeping(nats, store, epoch=1) as old:
        await begin(old)

    async def never() -> int:
        raise AssertionError("it must not go on in a new epoch")

    log = Log(nats)
    keeper = Keeper(log, store, 1, never)
    await keeper.start([JOB])
    async with keeping(nats, store, epoch=2):
        await send(nats, tokens(0, 0, 1))
        with pytest.raises(Fenced):
            await asyncio.wait_for(keeper.run(), 30)
    await log.close()


async def test_messages_of_jobs_that_are_not_open_are_counted_and_passed_over(nats: Client, store: Store) -> None:
    """Unknown, ended or deleted: nothing of them is kept, and the open job goes on behind them."""
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        await send(nats, tokens(0, 0, 3), job="rljob_unknown")
        await send(nats, b"garbage", job="rljob_unknown")
        await send(nats, scores_pb2.ScoreResult(handle=1).SerializeToString(), job="rljob_unknown", kind="scored")
        last = await send(nats, tokens(0, 0, 2))
        await until(lambda: length(keeper) == 2, "the open job's tokens")
        assert keeper.ignored == {"spans": 2, "scored": 1}
        assert "rljob_unknown" not in keeper.books
        await until(lambda: keeper.log.delivered >= last, "the end of the log")
        await keeper.close_job(JOB)
        await send(nats, tokens(0, 2, 2))
        await until(lambda: keeper.ignored["spans"] == 3, "the closed job's tokens to be counted")
        assert await store.redis.keys("rlharvest:{*}:*") == []


async def test_a_corrupt_message_changes_nothing_but_a_counter(nats: Client, store: Store) -> None:
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        for kind, who in (("spans", "wkr_1"), ("ledger", "coordinator"), ("scored", "reward")):
            await send(nats, b"\n\x05wkr_1\xff\xff\xff", kind=kind, who=who)
        await send(nats, tokens(0, 0, 1))
        await until(lambda: length(keeper) == 1, "the tokens behind it")
        assert keeper.books[JOB].counters["corrupt_messages"] == 3


async def test_what_comes_from_somebody_else_is_in_no_book_and_no_store(nats: Client, store: Store) -> None:
    """Tokens under another worker's subject, and orders or rewards from a worker: counted by the keeper, else ignored."""
    end = ledger_pb2.Transition(epoch=1, number=99, changes=[ledger_pb2.Change(end=ledger_pb2.End(reason="forged"))])
    score = scores_pb2.ScoreResult(job=JOB, handle=0, reward=1.0)
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        await send(nats, tokens(0, 0, 1), who="wkr_2")
        await send(nats, end.SerializeToString(), kind="ledger")
        await send(nats, score.SerializeToString(), kind="scored")
        await until(lambda: keeper.forged == 3, "all three to be counted")
        assert length(keeper) == 0
        assert not keeper.books[JOB].ended
        await send(nats, tokens(0, 0, 1))
        await until(lambda: length(keeper) == 1, "the tokens of the worker itself")


@pytest.mark.parametrize("epoch", [0, 2**32, 2**63, 2**64 - 1])
async def test_an_epoch_that_no_coordinator_can_have_fences_off_none(nats: Client, store: Store, epoch: int) -> None:
    """Even if it came from who may write transitions: else no coordinator could ever write to the job again."""
    begin_ = ledger_pb2.Transition(epoch=epoch, number=1, changes=[ledger_pb2.Change(begin=ledger_pb2.Begin())])
    async with keeping(nats, store, epoch=1) as keeper:
        await send(nats, begin_.SerializeToString(), kind="ledger", who="coordinator")
        await begin(keeper)
        await send(nats, tokens(0, 0, 1))
        await until(lambda: length(keeper) == 1, "tokens, which an assignment came before")
        assert keeper.books[JOB].counters["corrupt_messages"] == 1


async def test_a_commit_whose_reply_was_lost_is_recognised(
    nats: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The write reached the store, its answer did not come back: tried again, it is found done; no recovery, no doubling."""
    commit = store.commit
    lost = 0

    async def lossy(*arguments: Any) -> Position:
        nonlocal lost
        found = await commit(*arguments)
        if lost == 0:
            lost += 1
            raise RedisConnectionError("the reply was lost")
        return found

    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        monkeypatch.setattr(store, "commit", lossy)
        await send(nats, tokens(0, 0, 5))
        await send(nats, tokens(0, 5, 5))
        await until(lambda: length(keeper) == 10, "all tokens")
        assert lost == 1
        assert keeper.recoveries == 1
        assert keeper.epoch == 1
    book, _ = await store.begin(JOB, 1)
    assert book.responses[0].ids.tolist() == list(range(10))


async def test_a_store_that_lost_its_tail_is_brought_up_to_date_in_a_new_epoch(nats: Client, store: Store) -> None:
    """What it lost is read from the log again; the epoch rises, so that no attempt of before is given twice."""
    async with keeping(nats, store, epoch=1) as keeper:
        recovered: list[int] = []
        keeper.on_recovery = lambda: recovered.append(keeper.epoch)
        await begin(keeper)
        kept = await store.position(JOB)
        cursor = await store.cursor()
        records = await store.redis.llen(f"rlharvest:{{{JOB}}}:log")
        await send(nats, tokens(0, 0, 5))
        await until(lambda: length(keeper) == 5, "the first tokens")
        # The server is as it was before them.
        await store.redis.ltrim(f"rlharvest:{{{JOB}}}:log", 0, records - 1)
        await store.redis.hset(f"rlharvest:{{{JOB}}}:head", "applied", str(kept.applied))
        await store.redis.hset("rlharvest:cursor", mapping={"applied": cursor.applied, "mark": cursor.mark})
        await send(nats, tokens(0, 5, 5))
        await until(lambda: recovered == [2] and length(keeper) == 10, "the recovery")
        assert keeper.epoch == keeper.recoveries == 2
        assert keeper.books[JOB].counters["generated_tokens"] == 10
        assert keeper.books[JOB].responses[0].ids.tolist() == list(range(10))
        await until(lambda: keeper.books[JOB].epoch == 2, "the begin of the new epoch")


@pytest.mark.slow
async def test_a_store_that_is_away_stops_the_keeper_and_nothing_is_skipped(
    nats: Client, store: Store, valkey_server: ValkeyServer
) -> None:
    async with keeping(nats, store, epoch=1) as keeper:
        heard = Heard(store)
        await begin(keeper)
        assert await store.synced()
        keeper.listen(heard)
        valkey_server.kill()
        for offset in range(0, 20, 5):
            await send(nats, tokens(0, offset, 5))
        await asyncio.sleep(1.0)
        assert heard.sequences == []
        await asyncio.to_thread(valkey_server.start)
        await until(lambda: length(keeper) == 20, "all tokens")
        assert keeper.books[JOB].counters["generated_tokens"] == 20


@pytest.mark.slow
async def test_an_empty_stream_is_begun_anew_and_workers_are_asked_for_what_nobody_confirmed(
    nats: Client, nats_server: NatsServer, store: Store
) -> None:
    """The book stays as the store has it; the log goes on at 1; the epoch rises."""
    asked: list[int] = []

    async def resend(message: Any) -> None:
        asked.append(spans_pb2.Resend.FromString(message.data).epoch)

    await nats.subscribe(subject("resend", JOB), cb=resend)
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        await send(nats, tokens(0, 0, 5))
        await until(lambda: length(keeper) == 5, "the first tokens")
        nats_server.kill()
        shutil.rmtree(nats_server.directory / "jetstream")
        await asyncio.to_thread(nats_server.start)
        await until(lambda: keeper.recoveries == 2, "the recovery")
        await until(lambda: asked == [1, 2], "the workers to be asked, at the start and now")
        await send(nats, tokens(0, 3, 5))
        await until(lambda: length(keeper) == 8, "the tokens of the new stream")
        assert keeper.books[JOB].responses[0].ids.tolist() == list(range(8))
        assert keeper.books[JOB].counters["duplicate_tokens"] == 2


async def first_sequence(nats: Client) -> int:
    return (await nats.jetstream().stream_info(LEDGER)).state.first_seq


async def test_nothing_is_purged_that_is_not_on_disk(
    nats: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the store's word that its file is written the stream keeps all; with it, what was applied may go."""
    monkeypatch.setattr(module, "PURGE_EVERY_S", 0.02)
    durable = False

    async def synced() -> bool:
        return durable

    monkeypatch.setattr(store, "synced", synced)
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        for offset in range(0, 50, 5):
            last = await send(nats, tokens(0, offset, 5))
        await until(lambda: length(keeper) == 50, "all tokens")
        purging = asyncio.create_task(keeper.purge())
        await asyncio.sleep(0.5)
        assert await first_sequence(nats) == 1
        durable = True
        async with asyncio.timeout(10):
            while await first_sequence(nats) <= last:  # noqa: ASYNC110 - NATS tells nobody
                await asyncio.sleep(0.02)
        await cancel([purging])


async def test_nothing_is_purged_that_is_not_applied(
    nats: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only what lies below the cursor goes, however much is on disk."""
    monkeypatch.setattr(module, "PURGE_EVERY_S", 0.02)
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
    log = Log(nats)

    async def same() -> int:
        return 2

    idle = Keeper(log, store, 2, same)
    await idle.start([JOB])
    # It does not run: what comes now is applied by nobody.
    applied = (await store.cursor()).applied
    for offset in range(0, 20, 5):
        await send(nats, tokens(0, offset, 5))
    purging = asyncio.create_task(idle.purge())
    async with asyncio.timeout(10):
        while await first_sequence(nats) <= applied:  # noqa: ASYNC110 - NATS tells nobody
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    assert await first_sequence(nats) == applied + 1
    await cancel([purging])
    await log.close()


async def test_nothing_is_purged_that_the_store_lost_meanwhile(
    nats: Client, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that comes back without its tail after the look at its cursor keeps the stream."""
    monkeypatch.setattr(module, "PURGE_EVERY_S", 0.02)
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        early = await store.cursor()
        await send(nats, tokens(0, 0, 5))
        await until(lambda: length(keeper) == 5, "the tokens")
        await until(lambda: keeper.caught_up, "the keeper to be at rest")

        async def restarted() -> bool:
            await store.redis.hset("rlharvest:cursor", "applied", str(early.applied))
            return True

        monkeypatch.setattr(store, "synced", restarted)
        purging = asyncio.create_task(keeper.purge())
        await asyncio.sleep(0.5)
        assert await first_sequence(nats) <= early.applied + 1
        await cancel([purging])


async def test_a_stream_that_lost_its_tail_is_replaced(nats: Client, store: Store) -> None:
    """Another message under a number that was read: a new stream is begun, nothing is skipped."""
    async with keeping(nats, store, epoch=1) as keeper:
        await begin(keeper)
        await send(nats, tokens(0, 0, 5))
        await until(lambda: length(keeper) == 5, "the first tokens")
        identity, cursor = keeper.log.identity, await store.cursor()
        # The number of the last message that was read is of another message now.
        await store.redis.hset("rlharvest:cursor", "mark", str(cursor.mark + 1))
        keeper.log._mark = cursor.mark + 1
        await until(lambda: keeper.log.identity != identity, "the new stream")
        await send(nats, tokens(0, 5, 5))
        await until(lambda: length(keeper) == 10, "the tokens of the new stream")
        assert keeper.recoveries == 2
        assert keeper.books[JOB].responses[0].ids.tolist() == list(range(10))
