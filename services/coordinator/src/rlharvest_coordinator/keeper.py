"""The keeper of the books: reads the log, folds it, writes what it applied to the store, and then tells who listens.

Invariants: every message is applied to its job's book exactly once, in order, and is in the store before anyone hears of it;
a store that lost its tail or a stream that is new is recovered from before anything else is applied; a store that cannot be
reached stops the keeper where it is, nothing is skipped. The stream is purged only below what the store has fsynced.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import TypeVar, cast

import structlog
from redis.exceptions import RedisError
from rlharvest.bus import subject
from rlharvest.ledger.book import Book
from rlharvest.ledger.record import Effects, Kind, apply
from rlharvest.ledger.store import Cursor, Diverged, Position, Store
from rlharvest.spans import names
from rlharvest.v1 import ledger_pb2, spans_pb2

from rlharvest_coordinator.log import Entry, Log, StreamChanged
from rlharvest_coordinator.obstacles import Obstacle, of_store

log = structlog.get_logger(__name__)

Listener = Callable[[str, Sequence[tuple[Entry, Effects]]], Awaitable[None]]
"""Hears of what was applied to a job's book."""

T = TypeVar("T")

PURGE_EVERY_S = 5.0
PURGE_FULL_EVERY_S = 0.5
"""While the stream is full."""


class Keeper:
    """Books of the jobs that are open here."""

    def __init__(self, log_: Log, store: Store, epoch: int, new_epoch: Callable[[], Awaitable[int]]) -> None:
        self.log = log_
        self.store = store
        self.epoch = epoch
        self._new_epoch = new_epoch
        self.books: dict[str, Book] = {}
        self.ignored: Counter[str] = Counter()
        """Messages of jobs that are not open: ended, deleted, or of somebody else."""
        self.forged = 0
        """Messages of open jobs whose subject is of somebody who has nothing to say there."""
        self.recoveries = 0
        """Times the books were taken from the store, the start included."""
        self.applied_to = 0
        """Sequence up to which everything is applied."""
        self._known_to = 0
        """Last sequence of the log at the last recovery."""
        self.on_recovery: Callable[[], None] = lambda: None
        self.obstacle: Obstacle | None = None
        """Why the store takes nothing, while it does not."""
        self._positions: dict[str, Position] = {}
        self._number = 0
        """Of the last transition; no two of an epoch have the same, whatever their jobs."""
        self._listeners: list[Listener] = []
        self._lock = asyncio.Lock()

    @property
    def caught_up(self) -> bool:
        """Whether the books hold all that was in the log at the last recovery; before that a group may be missing."""
        return self.applied_to >= self._known_to

    def listen(self, listener: Listener) -> None:
        """Call `listener` after each batch that was applied and stored."""
        self._listeners.append(listener)

    async def start(self, jobs: Sequence[str]) -> None:
        """Open the store, the log and the books of jobs that are under way.

        Raises:
            Fenced: a coordinator of a higher epoch has them.
        """
        await self._retry(self.store.prepare)
        await self.log.open()
        for job in jobs:
            self.books[job] = Book(job)
        await self._recover()

    async def open(self, job: str) -> Book:
        """Return the book of a job; a new job's starts at the present end of the log."""
        async with self._lock:
            if job not in self.books:
                await self._begin(job)
        return self.books[job]

    async def close_job(self, job: str) -> None:
        """Forget a job that ended; what still comes for it is counted and ignored."""
        async with self._lock:
            self.books.pop(job, None)
            self._positions.pop(job, None)
        await self._retry(lambda: self.store.forget(job))

    async def propose(self, job: str, changes: Sequence[ledger_pb2.Change]) -> int:
        """Put changes into the log as one transition; return its sequence. They take effect when the log is read."""
        self._number += 1
        return await self.log.publish(
            job, ledger_pb2.Transition(epoch=self.epoch, number=self._number, changes=changes)
        )

    async def run(self) -> None:
        """Apply the log for ever.

        Raises:
            Fenced: a coordinator of a higher epoch took over.
        """
        while True:
            try:
                entries = await self.log.read()
                if entries:
                    applied = await self._apply(entries)
                    for job, effects in applied.items():
                        for listener in self._listeners:
                            await listener(job, effects)
            except StreamChanged as change:
                log.warning("ledger.stream_changed", identity=change.identity)
                await self._recover()
            except Diverged as change:
                log.warning("ledger.diverged", reason=str(change))
                await self._retry(self.store.prepare)
                await self._recover()

    async def purge(self) -> None:
        """Delete from the stream what the store holds on disk, for ever, every few seconds."""
        while True:
            await asyncio.sleep(PURGE_EVERY_S if self.log.obstacle is None else PURGE_FULL_EVERY_S)
            try:
                await self.log.measure()
            except Exception as error:  # noqa: BLE001 - the next round looks again
                log.warning("ledger.unmeasured", error=repr(error))
            identity, below = self.log.identity, await self._cursor()
            if below <= 0:
                continue
            try:
                # The store acknowledges when its append-only file is on disk up to here. That it is at the cursor still
                # shows that it is the store which was written: one that came back without its tail needs the stream.
                if await self.store.synced() and await self._cursor() >= below and identity == self.log.identity:
                    await self.log.purge(below + 1)
            except Exception as error:  # noqa: BLE001 - nothing is lost by purging later
                log.warning("ledger.purge_failed", error=repr(error))

    async def _apply(self, entries: Sequence[Entry]) -> dict[str, list[tuple[Entry, Effects]]]:
        by_job: dict[str, list[Entry]] = {}
        for entry in entries:
            by_job.setdefault(entry.job, []).append(entry)
        applied: dict[str, list[tuple[Entry, Effects]]] = {}
        async with self._lock:
            for job, mine in by_job.items():
                book = self.books.get(job)
                if book is None:
                    self.ignored.update(entry.kind for entry in mine)
                    continue
                position = self._positions[job]
                fresh = [entry for entry in mine if entry.sequence > position.applied and self._entitled(entry)]
                if not fresh:
                    continue
                applied[job] = [(entry, apply(book, entry.kind, entry.data)) for entry in fresh]
                for entry, effects in applied[job]:
                    if effects.corrupt:
                        log.warning("ledger.corrupt", job=job, who=entry.who, problem=effects.corrupt)
                await self._commit(book, position, fresh)
            self.applied_to = entries[-1].sequence
            cursor = Cursor(self.log.identity, self.applied_to, entries[-1].mark)
            await self._retry(lambda: self.store.set_cursor(self.epoch, cursor))
        return applied

    def _entitled(self, entry: Entry) -> bool:
        """Whether a message comes from whom it should: what another one says is in no book and in no store."""
        match entry.kind:
            case "ledger":
                entitled = entry.who == "coordinator"
            case "scored":
                entitled = entry.who == "reward"
            case _:
                entitled = names(entry.data, entry.who)
        if not entitled:
            self.forged += 1
            log.warning("ledger.forged", job=entry.job, kind=entry.kind, who=entry.who)
        return entitled

    async def _commit(self, book: Book, before: Position, fresh: Sequence[Entry]) -> None:
        records = [(cast(Kind, entry.kind), entry.data) for entry in fresh]
        tried = False

        async def commit() -> Position:
            nonlocal tried
            again, tried = tried, True
            try:
                return await self.store.commit(book, self.epoch, before, fresh[-1].sequence, records)
            except Diverged:
                # A reply that was lost on the way: the store has exactly this write already.
                if again and await self.store.position(book.job) == Position(before.stream, fresh[-1].sequence):
                    book.touched.clear()
                    return Position(before.stream, fresh[-1].sequence)
                raise

        self._positions[book.job] = await self._retry(commit)

    async def _recover(self) -> None:
        """Take the books from the store as they are and read the log from there."""
        async with self._lock:
            if self.recoveries:
                self.epoch = await self._new_epoch()
            self.recoveries += 1
            cursor = await self._retry(self.store.cursor)
            end, same = await self._reopen(cursor)
            start, mark = (cursor.applied, cursor.mark) if same else (0, 0)
            for job in list(self.books):
                await self._begin(job, end=start if same else 0)
            if not same:
                for job in self.books:
                    await self.log.nats.publish(
                        subject("resend", job), spans_pb2.Resend(epoch=self.epoch).SerializeToString()
                    )
            await self.log.start(start, mark)
            self.applied_to, self._known_to = start, end
        self.on_recovery()
        for job in list(self.books):
            await self.propose(job, [ledger_pb2.Change(begin=ledger_pb2.Begin())])
        log.info("ledger.recovered", jobs=len(self.books), after=start, same_stream=same)

    async def _reopen(self, cursor: Cursor) -> tuple[int, bool]:
        """Open the log; return its end and whether it is the stream of the cursor. One that lost its tail is replaced."""
        while True:
            try:
                info = await self.log.open()
                same = cursor.stream == self.log.identity
                if same and not await self.log.holds(cursor.applied, cursor.mark):
                    log.warning("ledger.log_lost_its_tail", applied=cursor.applied)
                    info, same = await self.log.replace(), False
                return int(info.state.last_seq), same
            except Exception as error:  # noqa: BLE001 - NATS is away; there is nothing to do but wait for it
                log.warning("ledger.waiting_for_nats", error=repr(error))
                await asyncio.sleep(0.25)

    async def _begin(self, job: str, end: int | None = None) -> None:
        """Load a book; where the store knows another stream or none, start at `end` (unset: at the end of the log)."""
        try:
            book, position = await self._retry(lambda: self.store.begin(job, self.epoch))
        except Diverged:  # a new server, which has no functions yet
            await self._retry(self.store.prepare)
            book, position = await self._retry(lambda: self.store.begin(job, self.epoch))
        if position.stream != self.log.identity:
            if end is None:
                end = int((await self.log.open()).state.last_seq)
            position = Position(self.log.identity, end)
            moved = position
            await self._retry(lambda: self.store.rebase(book, self.epoch, moved))
        self.books[job] = book
        self._positions[job] = position

    async def _cursor(self) -> int:
        cursor = await self._retry(self.store.cursor)
        return cursor.applied if cursor.stream == self.log.identity else 0

    async def _retry(self, call: Callable[[], Awaitable[T]]) -> T:
        """Call the store until it answers."""
        delay = 0.05
        failed = False
        while True:
            try:
                answer = await call()
                break
            except (RedisError, OSError) as error:
                failed = True
                self.obstacle = of_store(error)
                log.warning("ledger.store_waiting", reason=self.obstacle.reason, error=repr(error))
            await asyncio.sleep(delay)
            delay = min(2 * delay, 0.5)
        if failed:
            self.obstacle = None
        return answer
