"""Which coordinator leads: an epoch taken by compare-and-set in SQL, held by a beat under a short lease.

Invariants: epochs only rise; at most one coordinator can write with a given epoch (store.fence in the same transaction as
the write); who sees the beat stand still for a lease, on its own monotonic clock, may take over; wall clocks play no part. A
leader that finds itself replaced stops at once: nothing it does afterwards takes effect, but it should not try either.
"""

from __future__ import annotations

import asyncio

import structlog
from rlharvest.clock import Clock
from rlharvest.errors import Fenced
from sqlalchemy import select, update
from sqlalchemy.exc import IntegrityError

from rlharvest_coordinator import sql
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.tables import Leader

log = structlog.get_logger(__name__)

_ROW = 1
RELEASED = ""
"""Holder of a lease that was given up in order: nobody needs to wait for it."""


class Leadership:
    """One coordinator's claim to lead."""

    def __init__(self, sessions: Sessions, holder: str, clock: Clock, *, lease_s: float) -> None:
        self.sessions = sessions
        self.holder = holder
        self.clock = clock
        self.lease_s = lease_s
        self.epoch = 0
        """Epoch that this coordinator leads in; 0: it does not."""
        self._lock = asyncio.Lock()

    async def acquire(self) -> int:
        """Wait until this coordinator leads; return its epoch."""
        seen: tuple[int, int] | None = None
        since = self.clock.monotonic()
        while True:
            row = await self._read()
            if row is None:
                if await self._create():
                    break
                continue
            now = self.clock.monotonic()
            position = (row.epoch, row.beat)
            if position != seen:
                if seen is None:
                    log.info("leader.waiting", holder=row.holder, epoch=row.epoch)
                seen, since = position, now
            if (row.holder == RELEASED or now - since >= self.lease_s) and await self._take(row):
                break
            await self.clock.sleep(min(0.1, self.lease_s / 8))
        log.info("leader.acquired", epoch=self.epoch, holder=self.holder)
        return self.epoch

    async def hold(self) -> None:
        """Renew for ever.

        Raises:
            Fenced: another coordinator took over.
        """
        while True:
            await self.clock.sleep(self.lease_s / 5)
            try:
                async with self._lock:
                    held = await self._update(self.epoch, None, epoch=self.epoch, holder=self.holder)
                if not held:
                    raise Fenced(f"another coordinator took over after epoch {self.epoch}")
            except sql.FAULTS as error:
                log.warning("leader.renewal_failed", error=repr(error))

    async def check(self) -> None:
        """Raise Fenced unless this coordinator still leads."""
        row = await self._read()
        if row is None or row.epoch != self.epoch or row.holder != self.holder:
            raise Fenced(f"another coordinator took over after epoch {self.epoch}")

    async def still(self) -> None:
        """After a refusal: go on, soon, if it was for an epoch of this coordinator's own past. Raises Fenced."""
        await self.check()
        await self.clock.sleep(0.1)

    async def advance(self) -> int:
        """Go on in a new epoch, after a recovery: no attempt of the time before is ever given again.

        Raises:
            Fenced: another coordinator took over.
        """
        async with self._lock:
            if not await self._update(self.epoch, None, epoch=self.epoch + 1, holder=self.holder):
                raise Fenced(f"another coordinator took over after epoch {self.epoch}")
            self.epoch += 1
        return self.epoch

    async def release(self) -> None:
        """Give the lease up, so that a successor need not wait. Idempotent."""
        async with self._lock:
            if self.epoch:
                await self._update(self.epoch, None, epoch=self.epoch, holder=RELEASED)
                self.epoch = 0

    async def _read(self) -> Leader | None:
        async with self.sessions() as session:
            return (await session.execute(select(Leader).where(Leader.id == _ROW))).scalar_one_or_none()

    async def _create(self) -> bool:
        try:
            async with self.sessions.begin() as session:
                session.add(Leader(id=_ROW, epoch=1, holder=self.holder, beat=0))
        except IntegrityError:
            return False
        self.epoch = 1
        return True

    async def _take(self, row: Leader) -> bool:
        if await self._update(row.epoch, row.beat, epoch=row.epoch + 1, holder=self.holder):
            self.epoch = row.epoch + 1
            return True
        return False

    async def _update(self, expected: int, beat: int | None, *, epoch: int, holder: str) -> bool:
        statement = update(Leader).where(Leader.id == _ROW, Leader.epoch == expected)
        if beat is not None:
            statement = statement.where(Leader.beat == beat)
        async with self.sessions.begin() as session:
            result = await session.execute(
                statement.values(epoch=epoch, holder=holder, beat=Leader.beat + 1).returning(Leader.id)
            )
            return result.scalar_one_or_none() is not None
