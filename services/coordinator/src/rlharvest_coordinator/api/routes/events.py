"""/v1/jobs/{job}/events: a page of them, or a stream.

The stream (Accept: text/event-stream) begins behind Last-Event-ID, sends a comment when nothing happens, and ends with
an event named `end` once the job has ended and nothing has come for a moment. A client that loses it asks again with the
last id it saw and misses nothing.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Annotated, Literal

from fastapi import APIRouter, Header, Query, Request
from rlharvest.errors import InvalidField, NotFound
from rlharvest.jobs.state import TERMINAL, Status
from starlette.responses import Response

from rlharvest_coordinator.api.context import ERRORS, Context, JobId, Limit, Parts
from rlharvest_coordinator.api.resources import EventResource, ListOf, event_resource, listed
from rlharvest_coordinator.api.streams import CountedStream
from rlharvest_coordinator.store import events, jobs
from rlharvest_coordinator.store.values import finite

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERRORS)

POLL_S = 0.25
KEEP_ALIVE_S = 10.0
SETTLE_S = 1.5
"""Events on their way through the bus come within this time of a job's end."""

_BATCH = 200
_MOST = 2**62


@router.get(
    "/{job}/events",
    response_model=ListOf[EventResource],
    responses={200: {"content": {"text/event-stream": {}}, "description": "A page, or a stream."}},
)
async def list_events(
    request: Request,
    job: JobId,
    parts: Parts,
    limit: Limit = 100,
    after: Annotated[int | None, Query(ge=0, lt=_MOST, description="Number of the last event already seen.")] = None,
    order: Annotated[Literal["asc", "desc"], Query(description="`desc`: newest first, pages only.")] = "asc",
    last_event_id: Annotated[str | None, Header(description="As `after`, for a stream that goes on.")] = None,
) -> Response | ListOf[EventResource]:
    """Read the events of a job in order, or follow them (Accept: text/event-stream)."""
    await jobs.get(parts.sessions, job)
    if "text/event-stream" in request.headers.get("accept", ""):
        start = (after or 0) if last_event_id is None else _number(last_event_id)
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        parts.streams.enter()
        counted = CountedStream(stream(parts, job, start), media_type="text/event-stream", headers=headers)
        counted.streams = parts.streams
        return counted
    if order == "desc":
        found = await events.newest(parts.sessions, job, limit=limit, before=after)
    else:
        found = await events.after(parts.sessions, job, after or 0, limit=limit)
    return listed([event_resource(row) for row in found.rows], found.has_more)


async def stream(parts: Context, job: str, after: int) -> AsyncIterator[str]:
    """Yield the text of the stream until the job has ended, is deleted, or the process stops."""
    loop = asyncio.get_running_loop()
    said_at = loop.time()
    quiet_since: float | None = None
    yield "retry: 500\n\n"
    while not parts.stopping.is_set():
        try:
            ended = Status((await jobs.get(parts.sessions, job)).status) in TERMINAL
        except NotFound:
            break
        found = await events.after(parts.sessions, job, after, limit=_BATCH)
        for row in found.rows:
            data = json.dumps(finite(event_resource(row).model_dump()), allow_nan=False)
            yield f"id: {row.number}\ndata: {data}\n\n"
            after = row.number
        now = loop.time()
        if found.rows:
            quiet_since, said_at = None, now
        elif ended and quiet_since is None:
            quiet_since = now
        elif quiet_since is not None and now - quiet_since >= SETTLE_S:
            break
        elif now - said_at >= KEEP_ALIVE_S:
            yield ": still here\n\n"
            said_at = now
        if not found.has_more:
            await asyncio.sleep(POLL_S)
    else:
        return
    yield f"id: {after}\nevent: end\ndata: {{}}\n\n"


def _number(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and int(text) < _MOST):
        raise InvalidField("Last-Event-ID", text, "not the number of an event", "Send the last `id:` of the stream.")
    return int(text)
