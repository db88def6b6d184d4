"""Events in SQL.

Invariants: an event that comes twice is kept once; numbers rise in the order in which events become visible, so that
whoever reads "after number n" misses none.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from rlharvest.bus import NO_JOB
from rlharvest.errors import CorruptData, NotFound
from rlharvest.v1 import events_pb2
from sqlalchemy import select, text
from sqlalchemy.dialects import postgresql, sqlite

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store.page import Page, page
from rlharvest_coordinator.store.values import finite, storable
from rlharvest_coordinator.tables import Event, Job

LEVELS = ("info", "warn", "error")
_SHORT = 100
"""Characters of an id and of a type."""

_ORDER_LOCK = 7_236_014_553
"""Key of the advisory lock that makes PostgreSQL number events in the order of their commits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewEvent:
    """An event on its way into SQL."""

    id: str
    job: str
    level: str
    type: str
    message: str
    at: float
    source: str
    data: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_message(cls, message: events_pb2.Event, *, job: str, source: str) -> Self:
        """Return the event of a bus message that came for a job, from a source, as its subject says.

        Raises:
            CorruptData: it names others, its data is no JSON object, or SQL could not keep it.
        """
        if (message.job, message.source) != (job, source):
            raise CorruptData(f"it is of job {message.job[:_SHORT]!r} and {message.source[:_SHORT]!r}")
        if message.level not in LEVELS:
            raise CorruptData(f"its level is {message.level[:_SHORT]!r}, not one of {', '.join(LEVELS)}")
        for name, word in (("id", message.id), ("type", message.type)):
            if not (0 < len(word) <= _SHORT and word.isprintable()):
                raise CorruptData(
                    f"its {name} is {word[:_SHORT]!r}, not a printable word of at most {_SHORT} characters"
                )
        if not math.isfinite(message.at):
            raise CorruptData(f"it happened at {message.at}")
        try:
            data = json.loads(message.data_json or "{}")
            json.dumps(data)
        except (ValueError, RecursionError) as error:
            raise CorruptData(f"data_json is not JSON: {error}") from error
        if not isinstance(data, dict):
            raise CorruptData("data_json is not an object")
        return cls(
            id=message.id,
            job=message.job,
            level=message.level,
            type=message.type,
            message=message.message,
            at=message.at,
            source=message.source,
            data=data,
        )


async def append(sessions: Sessions, events: Sequence[NewEvent]) -> int:
    """Keep events in order, without those that are known or of a job that is not there; return how many were new."""
    if not events:
        return 0
    async with sessions.begin() as session:
        on_postgresql = session.get_bind().dialect.name == "postgresql"
        if on_postgresql:
            await session.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": _ORDER_LOCK})
        jobs = {event.job for event in events}
        known = {*await session.scalars(select(Job.id).where(Job.id.in_(jobs), Job.deleted.is_(False))), NO_JOB}
        insert = postgresql.insert if on_postgresql else sqlite.insert
        new = 0
        for event in events:
            if event.job not in known:
                continue
            statement = (
                insert(Event)
                .values(
                    id=event.id,
                    job=event.job,
                    level=event.level,
                    type=event.type,
                    message=storable(event.message),
                    data=finite(event.data),
                    at=event.at,
                    source=event.source,
                )
                .on_conflict_do_nothing(index_elements=["id"])
                .returning(Event.number)
            )
            new += (await session.scalar(statement)) is not None
        return new


async def after(sessions: Sessions, job: str, number: int, *, limit: int) -> Page[Event]:
    """Return the events of a job behind `number`, oldest first."""
    query = select(Event).where(Event.job == job, Event.number > number).order_by(Event.number)
    async with sessions() as session:
        return page((await session.scalars(query.limit(limit + 1))).all(), limit)


async def newest(sessions: Sessions, job: str, *, limit: int, before: int | None = None) -> Page[Event]:
    """Return the events of a job, newest first, from behind number `before`."""
    query = select(Event).where(Event.job == job).order_by(Event.number.desc())
    if before is not None:
        query = query.where(Event.number < before)
    async with sessions() as session:
        return page((await session.scalars(query.limit(limit + 1))).all(), limit)


async def number(sessions: Sessions, job: str, event: str) -> int:
    """Return the number of an event. Raises NotFound."""
    async with sessions() as session:
        found = await session.scalar(select(Event.number).where(Event.job == job, Event.id == event))
    if found is None:
        raise NotFound(f"job {job} has no event {event!r}")
    return found
