"""The ledger in a real Valkey: what was committed is what is read back, and nobody writes over anybody."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.exceptions import RedisError
from rlharvest.errors import Fenced, InvalidField
from rlharvest.ledger import snapshot
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import Kind, apply
from rlharvest.ledger.response import attempt_of
from rlharvest.ledger.store import Cursor, Diverged, Position, Store
from rlharvest.spans import Finish, Flush, Run, Span, pack
from rlharvest.testing.servers import ValkeyServer
from rlharvest.v1 import ledger_pb2, scores_pb2

Record = tuple[Kind, bytes]

N = 2
BUDGET = 12


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ValkeyServer]:
    """One Valkey for the tests that do not break it; each takes a job of its own."""
    running = ValkeyServer(tmp_path_factory.mktemp("valkey"))
    running.start()
    yield running
    running.stop()


@pytest.fixture
async def store(server: ValkeyServer) -> AsyncIterator[Store]:
    found = Store.connect(server.url)
    await found.prepare()
    yield found
    await found.close()


@pytest.fixture
async def own_store(valkey_server: ValkeyServer) -> AsyncIterator[Store]:
    """A store whose server this test may break."""
    found = Store.connect(valkey_server.url)
    await found.prepare()
    yield found
    await found.close()


def transition(*changes: ledger_pb2.Change, epoch: int = 1) -> Record:
    return "ledger", ledger_pb2.Transition(epoch=epoch, number=1, changes=changes).SerializeToString()


def admit(group: int) -> ledger_pb2.Change:
    return ledger_pb2.Change(
        admit=ledger_pb2.Admit(group=group, first_handle=group * N, n=N, budget=BUDGET, prompt=group)
    )


def assign(handle: int, serial: int, epoch: int = 1) -> ledger_pb2.Change:
    value = ledger_pb2.Assign(handle=handle, attempt=attempt_of(epoch, serial), worker="wkr_1", incarnation=1)
    return ledger_pb2.Change(assign=value)


def orphan(handle: int, serial: int) -> ledger_pb2.Change:
    value = ledger_pb2.Orphan(handle=handle, attempt=attempt_of(1, serial), reason=ledger_pb2.ORPHAN_REASON_DEAD)
    return ledger_pb2.Change(orphan=value)


def spans(handle: int, serial: int, offset: int, n: int, finish: Finish = Finish.NONE, version: int = 0) -> Record:
    span = Span(
        handle=handle,
        attempt=attempt_of(1, serial),
        offset=offset,
        ids=np.arange(offset, offset + n, dtype=np.uint32) + 100 * handle,
        logprobs=np.full(n, -0.5, np.float32),
        runs=(Run(n, version),) if n else (),
        finish=finish if n or finish else Finish.EOS,
    )
    return "spans", pack(Flush(worker="wkr_1", incarnation=1, number=1, spans=(span,)))


def score(handle: int, job: str = "made-up") -> Record:
    return "scored", scores_pb2.ScoreResult(job=job, handle=handle, reward=0.25).SerializeToString()


START = [transition(admit(0), assign(0, 1), assign(1, 1)), spans(0, 1, 0, 4), spans(1, 1, 0, 2)]


def contents(book: Book) -> dict[str, Any]:
    """Everything of a book, comparable."""
    return {
        "head": (book.job, book.epoch, book.next_group, book.ended),
        "groups": book.groups,
        "counters": {name: value for name, value in book.counters.items() if value},
        "responses": {handle: snapshot.dump_response(item) for handle, item in book.responses.items()},
    }


async def write(store: Store, book: Book, before: Position, records: Sequence[Record], *, epoch: int = 1) -> Position:
    """Apply records to a book and commit them, as the keeper does."""
    for kind, data in records:
        apply(book, kind, data)
    return await store.commit(book, epoch, before, before.applied + len(records), records)


async def opened(store: Store, job: str, *, epoch: int = 1) -> tuple[Book, Position]:
    """Begin a job on the stream `s`."""
    book, position = await store.begin(job, epoch)
    assert position == Position("", 0)
    await store.rebase(book, epoch, Position("s", 0))
    return book, Position("s", 0)


async def test_what_was_committed_is_read_back(store: Store) -> None:
    """A second coordinator finds the book, the position and what the job has counted."""
    book, position = await opened(store, "back")
    position = await write(store, book, position, START)
    position = await write(store, book, position, [spans(0, 1, 4, 3, Finish.EOS), score(0, "back")])
    again, found = await store.begin("back", 2)
    assert found == position == Position("s", 5)
    assert contents(again) == contents(book)
    assert again.responses[0].ids.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert not again.touched


async def test_people_see_state_attempt_length_and_worker_of_each_response(store: Store) -> None:
    """The hash `state` follows the book, and forgets what left it."""
    book, position = await opened(store, "seen")
    position = await write(store, book, position, START)
    key = "rlharvest:{seen}:state"
    attempt = attempt_of(1, 1)
    assert await store.redis.hgetall(key) == {
        b"0": f"streaming {attempt} 4 wkr_1".encode(),
        b"1": f"streaming {attempt} 2 wkr_1".encode(),
    }
    drop = ledger_pb2.Change(drop=ledger_pb2.Drop(group=0))
    await write(store, book, position, [transition(drop)])
    assert await store.redis.hgetall(key) == {}


RECORDS = st.one_of(
    st.builds(lambda g: transition(admit(g)), st.integers(0, 3)),
    st.builds(lambda h, s: transition(assign(h, s)), st.integers(0, 7), st.integers(1, 4)),
    st.builds(lambda h, s: transition(orphan(h, s)), st.integers(0, 7), st.integers(1, 4)),
    st.builds(
        spans,
        st.integers(0, 7),
        st.integers(1, 4),
        st.integers(0, BUDGET),
        st.integers(0, 6),
        st.sampled_from([Finish.NONE, Finish.EOS]),
        st.integers(0, 3),
    ),
    st.builds(score, st.integers(0, 7)),
    st.builds(lambda g: transition(ledger_pb2.Change(retire=ledger_pb2.Retire(group=g))), st.integers(0, 3)),
    st.just(("spans", b"garbage")),
)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.lists(RECORDS, min_size=1, max_size=8), st.booleans()), max_size=8))
def test_a_book_that_is_rebuilt_equals_the_live_one(
    server: ValkeyServer, batches: list[tuple[list[Record], bool]]
) -> None:
    """Whatever was applied, in whatever batches, and whenever the log was compacted."""

    async def check() -> None:
        store = Store.connect(server.url)
        try:
            await store.prepare()
            await store.forget("made-up")
            # Two groups with owners are there from the start, so that most of what is drawn takes effect.
            book, position = await opened(store, "made-up")
            begun = transition(admit(0), admit(1), *(assign(handle, 1) for handle in range(4)))
            position = await write(store, book, position, [begun])
            for records, compacts in batches:
                position = await write(store, book, position, records)
                if compacts:
                    await store.compact(book, 1, position)
                rebuilt, found = await store.begin("made-up", 1)
                assert found == position
                assert contents(rebuilt) == contents(book)
        finally:
            await store.close()

    asyncio.run(check())


async def test_a_long_log_is_compacted_by_itself(store: Store) -> None:
    """What is kept stays within a small multiple of what is live, and is still the whole book."""
    book, position = await opened(store, "long")
    position = await write(store, book, position, START)
    noise: Record = ("spans", b"x" * (1 << 20))
    for _ in range(6):
        position = await write(store, book, position, [noise])
    assert await store.redis.llen("rlharvest:{long}:log") <= 2
    again, found = await store.begin("long", 1)
    assert found == position
    assert contents(again) == contents(book)


async def test_a_commit_of_more_records_than_one_command_takes_keeps_their_order(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rlharvest.ledger.store._LEAST_LOG_BYTES", 1 << 30)  # nothing is compacted
    book, position = await opened(store, "many")
    position = await write(store, book, position, START)
    more = [spans(0, 1, 4 + place % 3, 1) for place in range(2500)]
    position = await write(store, book, position, [*more, spans(1, 1, 2, 1)])
    log = await store.redis.lrange("rlharvest:{many}:log", 0, -1)
    assert [record[1:] for record in log[len(START) :]] == [data for _, data in more] + [spans(1, 1, 2, 1)[1]]
    again, found = await store.begin("many", 1)
    assert found == position
    assert contents(again) == contents(book)


async def test_tokens_alone_write_nothing_but_the_log(store: Store) -> None:
    """The hash for people has a response's length when its state changed last."""
    book, position = await opened(store, "quiet")
    position = await write(store, book, position, START)
    key = "rlharvest:{quiet}:state"
    before = await store.redis.hgetall(key)
    position = await write(store, book, position, [spans(0, 1, 4, 3)])
    assert await store.redis.hgetall(key) == before
    await write(store, book, position, [spans(0, 1, 7, 1, Finish.EOS)])
    assert (await store.redis.hget(key, "0")).startswith(b"finished ")
    assert b" 8 " in await store.redis.hget(key, "0")


async def test_a_snapshot_that_was_cut_short_is_not_used(store: Store) -> None:
    """A coordinator that dies while it writes the next snapshot leaves the old one and the log in force."""
    book, position = await opened(store, "torn")
    position = await write(store, book, position, START)
    await store.redis.hset("rlharvest:{torn}:snap:1", "0", b"half of a response")
    again, _ = await store.begin("torn", 1)
    assert contents(again) == contents(book)
    await store.compact(again, 1, position)
    last, _ = await store.begin("torn", 1)
    assert contents(last) == contents(book)
    await store.redis.hset("rlharvest:{torn}:snap:2", "0", b"half of a response")
    await store.forget("torn")
    assert await store.redis.keys("rlharvest:{torn}:*") == []


async def test_a_lower_epoch_is_fenced_from_every_write(store: Store) -> None:
    """Once a newer coordinator took a job over, the old one can neither commit, compact, rebase nor take it back."""
    book, position = await opened(store, "fenced")
    position = await write(store, book, position, START)
    taken, _ = await store.begin("fenced", 2)
    apply(book, *score(0))
    with pytest.raises(Fenced, match="epoch 2"):
        await store.commit(book, 1, position, 4, [score(0)])
    with pytest.raises(Fenced):
        await store.compact(book, 1, position)
    with pytest.raises(Fenced):
        await store.rebase(book, 1, Position("other", 0))
    with pytest.raises(Fenced):
        await store.begin("fenced", 1)
    after, found = await store.begin("fenced", 2)
    assert found == position
    assert contents(after) == contents(taken)
    assert await write(store, taken, position, [spans(0, 1, 4, 1)], epoch=2) == Position("s", 4)


async def test_a_store_that_lost_its_tail_is_found_at_the_next_write(store: Store) -> None:
    """Diverged; nothing is patched over."""
    book, position = await opened(store, "tail")
    position = await write(store, book, position, START)
    await store.redis.hset("rlharvest:{tail}:head", "applied", 2)
    await store.redis.rpop("rlharvest:{tail}:log")
    with pytest.raises(Diverged, match="is at s 2"):
        await write(store, book, position, [spans(0, 1, 4, 1)])
    with pytest.raises(Diverged):
        await store.compact(book, 1, position)
    assert await store.position("tail") == Position("s", 2)


async def test_a_commit_whose_reply_was_lost_is_not_written_twice(store: Store) -> None:
    """The second try finds the position past it; the position tells that it was this very write."""
    book, position = await opened(store, "lost-reply")
    await write(store, book, position, START)
    with pytest.raises(Diverged):
        await store.commit(book, 1, position, 3, START)
    assert await store.position("lost-reply") == Position("s", 3)
    again, _ = await store.begin("lost-reply", 1)
    assert contents(again) == contents(book)


async def test_another_server_is_found_at_the_next_write(own_store: Store, valkey_server: ValkeyServer) -> None:
    """An empty server behind the same address lacks the functions, and then the position."""
    book, position = await opened(own_store, "moved")
    position = await write(own_store, book, position, START)
    valkey_server.kill()
    for path in sorted((valkey_server.directory / "appendonlydir").iterdir()):
        path.unlink()
    valkey_server.start()
    await _answers(own_store)
    with pytest.raises(Diverged, match="functions are missing"):
        await own_store.commit(book, 1, position, 4, [score(0)])
    await own_store.prepare()
    with pytest.raises(Diverged, match="not where this coordinator left it"):
        await own_store.commit(book, 1, position, 4, [score(0)])


async def test_the_cursor_never_goes_back_and_an_old_coordinator_does_not_move_it(own_store: Store) -> None:
    await own_store.prepare()
    await own_store.set_cursor(2, Cursor("stream", 7))
    await own_store.set_cursor(2, Cursor("stream", 5))
    assert await own_store.cursor() == Cursor("stream", 7)
    with pytest.raises(Fenced):
        await own_store.set_cursor(1, Cursor("stream", 9))
    await own_store.set_cursor(3, Cursor("another", 1))
    assert await own_store.cursor() == Cursor("another", 1)


async def test_what_is_synced_survives_sigkill(own_store: Store, valkey_server: ValkeyServer) -> None:
    """`synced` says the truth: what was written before it is there after a SIGKILL of the server."""
    book, position = await opened(own_store, "durable")
    position = await write(own_store, book, position, START)
    cursor = Cursor(position.stream, position.applied, mark=7)
    await own_store.set_cursor(1, cursor)
    assert await own_store.synced()
    valkey_server.kill()
    valkey_server.start()
    await _answers(own_store)
    again, found = await own_store.begin("durable", 2)
    assert found == position
    assert contents(again) == contents(book)
    assert await own_store.cursor() == cursor


async def test_a_job_that_is_forgotten_leaves_nothing(store: Store) -> None:
    book, position = await opened(store, "gone")
    position = await write(store, book, position, START)
    await store.compact(book, 1, position)
    await store.forget("gone")
    assert await store.redis.keys("rlharvest:{gone}:*") == []
    assert await store.position("gone") == Position("", 0)


async def test_a_server_that_may_evict_is_refused_with_the_fix(own_store: Store) -> None:
    await own_store.redis.config_set("maxmemory-policy", "allkeys-lru")
    with pytest.raises(InvalidField) as caught:
        await own_store.prepare()
    assert caught.value.field == "maxmemory-policy"
    assert caught.value.value == "allkeys-lru"
    assert "noeviction" in caught.value.fix


async def test_an_unreachable_server_is_named_by_its_own_error(tmp_path: Path) -> None:
    """What the keeper retries: never mistaken for Diverged or Fenced."""
    server = ValkeyServer(tmp_path / "valkey")
    store = Store.connect(server.url)
    with pytest.raises((RedisError, OSError)):
        await store.begin("nowhere", 1)
    await store.close()


async def _answers(store: Store) -> None:
    """Wait until the client has a connection to the server that came back."""
    for _ in range(100):
        try:
            await store.redis.ping()
            return
        except (RedisError, OSError):
            await asyncio.sleep(0.05)
    raise AssertionError("the server did not come back")
