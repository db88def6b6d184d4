"""/v1/audit: who changed what."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from rlharvest_coordinator.api.context import ERRORS, Limit, Parts
from rlharvest_coordinator.api.resources import ListOf, Resource, listed
from rlharvest_coordinator.store import audit
from rlharvest_coordinator.store.audit import Record
from rlharvest_coordinator.tables import AuditRow

router = APIRouter(prefix="/v1/audit", tags=["service"], responses=ERRORS)

_MOST = 2**62


class AuditResource(Record, Resource):
    """One call that changed something, or was refused."""

    id: str
    """Its number; rises with time."""
    object: Literal["rl.audit"] = "rl.audit"


@router.get("")
async def list_audit(
    parts: Parts,
    limit: Limit = 100,
    after: Annotated[int | None, Query(ge=0, lt=_MOST, description="Number of the last record already seen.")] = None,
    subject: Annotated[str | None, Query(description="Only calls about this job or worker.", max_length=200)] = None,
) -> ListOf[AuditResource]:
    """List the calls that changed something or were refused, newest first."""
    found = await audit.newest(parts.sessions, limit=limit, before=after, subject=subject)
    return listed([_resource(row) for row in found.rows], found.has_more)


def _resource(row: AuditRow) -> AuditResource:
    return AuditResource(id=str(row.number), **{name: getattr(row, name) for name in Record.model_fields})
