"""What routes work with, and the parameters that many of them share."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Annotated, Any

import httpx
from fastapi import Depends, Header, Path, Query
from rlharvest.health import Health
from starlette.requests import Request

from rlharvest_coordinator.api.errors import ErrorBody
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.streams import Streams
from rlharvest_coordinator.gateway.gateway import Gateway
from rlharvest_coordinator.live import LiveView
from rlharvest_coordinator.settings import CoordinatorSettings
from rlharvest_coordinator.sql import Sessions


@dataclass(frozen=True, kw_only=True)
class Context:
    """The parts of one app."""

    settings: CoordinatorSettings
    sessions: Sessions
    live: LiveView
    health: Health
    jobs: Jobs
    gateway: Gateway
    http: httpx.AsyncClient
    """Reaches the weight service."""
    streams: Streams
    """The event streams that are open."""
    stopping: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the process stops: streams end."""


def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


Parts = Annotated[Context, Depends(_context)]
JobId = Annotated[str, Path(description="Identifier of a job, rljob_….")]
MOST_ROWS = 1000
"""Of a page."""

Limit = Annotated[int, Query(ge=1, le=MOST_ROWS, description="Most rows to return.")]
After = Annotated[str | None, Query(description="Cursor: identifier of the last one already seen.")]
IdempotencyKey = Annotated[
    str | None, Header(description="The same key and body give the same job again, the same key and another body 409.")
]

ERRORS: dict[int | str, dict[str, Any]] = {
    "4XX": {"model": ErrorBody, "description": "What was asked cannot be done; the message says what to do."},
    "5XX": {"model": ErrorBody, "description": "The server failed, or another coordinator leads."},
}
"""Every route's other answers."""
