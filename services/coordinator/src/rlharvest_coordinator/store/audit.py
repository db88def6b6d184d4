"""Who changed what through the API. A deleted job keeps its records; the newest MOST of all stay."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from sqlalchemy import delete, select

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store.page import Page, page
from rlharvest_coordinator.store.values import storable
from rlharvest_coordinator.tables import AuditRow

MOST = 100_000

SWEEP = 1_000
"""Records between two deletions of old ones."""

_LONGEST = 200
"""Characters of what a caller chose."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One call that changed something, or was to."""

    at: float
    who: str
    """Name of the caller's token, made from it and not telling it; `anyone` where none is asked for."""
    address: str
    """Where the call came from."""
    protocol: str
    """rest | grpc"""
    action: str
    """Name of the operation, e.g. cancel_job."""
    subject: str | None
    """The job or worker it was about."""
    result: str
    """HTTP status, or gRPC's code or the error by name."""
    done: bool
    """Whether it was let through."""


async def append(sessions: Sessions, record: Record) -> None:
    """Keep a record."""
    subject = None if record.subject is None else storable(record.subject[:_LONGEST])
    row = AuditRow(**{**asdict(record), "subject": subject})
    async with sessions.begin() as session:
        session.add(row)
        await session.flush()
        if row.number % SWEEP == 0:
            await session.execute(delete(AuditRow).where(AuditRow.number <= row.number - MOST))


async def newest(
    sessions: Sessions, *, limit: int, before: int | None = None, subject: str | None = None
) -> Page[AuditRow]:
    """Return records, newest first, from behind number `before`; of one job or worker if `subject` is given."""
    query = select(AuditRow).order_by(AuditRow.number.desc())
    if before is not None:
        query = query.where(AuditRow.number < before)
    if subject is not None:
        query = query.where(AuditRow.subject == storable(subject))
    async with sessions() as session:
        return page((await session.scalars(query.limit(limit + 1))).all(), limit)
