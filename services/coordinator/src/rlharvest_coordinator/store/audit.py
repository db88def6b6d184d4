"""Who changed what through the API. A deleted job keeps its records; the newest MOST of all stay."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict
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


class Record(BaseModel):
    """One call that changed something, or was to."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid", frozen=True)

    at: float
    """Seconds since 1970."""
    who: str
    """Name of the caller's token (it does not tell the token); `anyone` where the server asks for none."""
    address: str
    """Where the call came from."""
    protocol: str
    """rest or grpc."""
    action: str
    """Name of the operation, as in the description of the API, e.g. cancel_job."""
    subject: str | None
    """The job or worker it was about."""
    result: str
    """HTTP status, or the error of a gRPC call."""
    done: bool
    """Whether it was let through."""


async def append(sessions: Sessions, record: Record) -> None:
    """Keep a record."""
    subject = None if record.subject is None else storable(record.subject[:_LONGEST])
    row = AuditRow(**{**record.model_dump(), "subject": subject})
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
