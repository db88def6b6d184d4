"""Workers in SQL: the newest incarnation of each, also of those that left."""

from __future__ import annotations

from typing import Any

from rlharvest.errors import NotFound
from sqlalchemy import select

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import fence
from rlharvest_coordinator.tables import Worker


async def join(
    sessions: Sessions, worker: str, incarnation: int, *, now: float, epoch: int | None = None, **fields: Any
) -> None:
    """Keep a worker that joined; an older incarnation than the known one changes nothing.

    Args:
        fields: columns of tables.Worker: state, worker_class, worker_type, hostname, pid, engines, slots, numerics_key,
            batch_invariant, build.
    """
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        row = await session.get(Worker, worker, with_for_update=True)
        if row is None:
            session.add(Worker(id=worker, incarnation=incarnation, joined_at=now, **fields))
        elif incarnation > row.incarnation:
            row.incarnation, row.joined_at, row.left_at, row.reason = incarnation, now, None, ""
            for name, value in fields.items():
                setattr(row, name, value)


async def set_state(
    sessions: Sessions, worker: str, incarnation: int, state: str, *, reason: str = "", epoch: int | None = None
) -> None:
    """Keep the state of an incarnation; of an older one it changes nothing."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        row = await session.get(Worker, worker, with_for_update=True)
        if row is not None and row.incarnation == incarnation:
            row.state, row.reason = state, reason


async def leave(
    sessions: Sessions,
    worker: str,
    incarnation: int,
    *,
    state: str,
    reason: str,
    now: float,
    epoch: int | None = None,
) -> None:
    """Keep that an incarnation left (`gone`) or died (`dead`)."""
    async with sessions.begin() as session:
        await fence.require(session, epoch)
        row = await session.get(Worker, worker, with_for_update=True)
        if row is not None and row.incarnation == incarnation and row.left_at is None:
            row.state, row.reason, row.left_at = state, reason, now


async def get(sessions: Sessions, worker: str) -> Worker:
    """Return a worker. Raises NotFound."""
    async with sessions() as session:
        row = await session.get(Worker, worker)
        if row is None:
            raise NotFound(f"there is no worker {worker!r}")
        return row


async def newest(sessions: Sessions, *, limit: int) -> list[Worker]:
    """Return workers, the last that joined first."""
    async with sessions() as session:
        return list(await session.scalars(select(Worker).order_by(Worker.joined_at.desc(), Worker.id).limit(limit)))
