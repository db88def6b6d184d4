"""Writes of a coordinator that has been replaced are refused inside their own transaction."""

from __future__ import annotations

from rlharvest.errors import Fenced
from sqlalchemy import select, update
from sqlalchemy.ext.asyncio import AsyncSession

from rlharvest_coordinator.tables import Leader


async def require(session: AsyncSession, epoch: int | None) -> None:
    """Go on only if nobody took over since `epoch`; holds the row of the leader until the transaction ends.

    The update changes nothing. It takes the write lock (SQLite) or the row's (PostgreSQL), so that a take-over comes
    either before the check or after the commit.

    Raises:
        Fenced: a newer epoch is on record.
    """
    if epoch is None:
        return
    await session.execute(update(Leader).values(epoch=Leader.epoch))
    newest = await session.scalar(select(Leader.epoch))
    if newest is not None and newest > epoch:
        raise Fenced(f"epoch {epoch} of this coordinator is over; epoch {newest} leads")
