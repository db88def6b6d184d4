"""/v1/audit: who changed what."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Query

from rlharvest_coordinator.api.context import ERRORS, Limit, Parts
from rlharvest_coordinator.api.resources import ListOf, Resource, Seconds, listed
from rlharvest_coordinator.store import audit
from rlharvest_coordinator.tables import AuditRow

router = APIRouter(prefix="/v1/audit", tags=["service"], responses=ERRORS)

_MOST = 2**62


class AuditResource(Resource):
    """One call that changed something, or was refused."""

    id: str
    """Its number; rises with time."""
    object: Literal["rl.audit"] = "rl.audit"
    at: Seconds
    who: str
    """Name of the caller's token (it does not tell the token); `anyone` where the server asks for none."""
    address: str
    protocol: str
    """rest or grpc."""
    action: str
    """Name of the operation, as in this description."""
    subject: str | None
    """The job or worker it was about."""
    result: str
    """HTTP status, or the error of a gRPC call."""
    done: bool


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
    return AuditResource(
        id=str(row.number),
        at=row.at,
        who=row.who,
        address=row.address,
        protocol=row.protocol,
        action=row.action,
        subject=row.subject,
        result=row.result,
        done=row.done,
    )
