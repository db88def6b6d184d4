"""/v1/workers and /v1/weights: who generates, and what can be pulled."""

from __future__ import annotations

from typing import Annotated

import httpx
from fastapi import APIRouter, Path, Query
from pydantic import Field
from rlharvest.errors import Unavailable

from rlharvest_coordinator.api.context import ERRORS, Context, JobId, Limit, Parts
from rlharvest_coordinator.api.fleet import VersionResource, WorkerResource, live_worker, past_worker
from rlharvest_coordinator.api.resources import ListOf, Resource, listed
from rlharvest_coordinator.store import jobs, workers

router = APIRouter(prefix="/v1", tags=["fleet"], responses=ERRORS)

WorkerId = Annotated[str, Path(description="Identifier of a worker, wkr_….")]


class Drain(Resource):
    """Why a worker shall leave."""

    reason: str = Field("", max_length=1000)
    """For people."""


class VersionList(Resource):
    """Versions, oldest first."""

    object: str = "list"
    data: list[VersionResource]
    has_more: bool = False


@router.get("/workers")
async def list_workers(
    parts: Parts,
    limit: Limit = 1000,
    gone: Annotated[bool, Query(description="Also those that left or died, last.")] = True,
) -> ListOf[WorkerResource]:
    """List workers: those that are here, then the last ones that left."""
    here = sorted(parts.live.workers(), key=lambda worker: worker.joined_at)
    shown = [live_worker(worker) for worker in here]
    if gone and len(shown) < limit:
        known = {worker.id for worker in here}
        shown += [past_worker(row) for row in await workers.newest(parts.sessions, limit=limit) if row.id not in known]
    return listed(shown[:limit], len(shown) > limit)


@router.get("/workers/{worker}")
async def get_worker(worker: WorkerId, parts: Parts) -> WorkerResource:
    """Read a worker."""
    return await _worker(parts, worker)


@router.post("/workers/{worker}/drain", status_code=202)
async def drain_worker(worker: WorkerId, parts: Parts, order: Drain | None = None) -> WorkerResource:
    """Tell a worker to stop, hand back what it holds, and leave."""
    await parts.jobs.drain(worker, order.reason if order is not None and order.reason else "asked by a user")
    return await _worker(parts, worker)


@router.get("/weights/{job}")
async def list_versions(job: JobId, parts: Parts) -> VersionList:
    """List the versions of a job that the weight service has, oldest first."""
    await jobs.get(parts.sessions, job)
    url = f"{parts.settings.weights_url.rstrip('/')}/v1/jobs/{job}/versions"
    try:
        reply = await parts.http.get(url, headers=parts.settings.as_service.headers)
    except httpx.HTTPError as error:
        raise Unavailable(f"the weight service does not answer at {parts.settings.weights_url}: {error!r}") from error
    if reply.status_code == 404:
        return VersionList(data=[])
    if reply.is_error:
        raise Unavailable(f"the weight service answers {reply.status_code} to {url}")
    return VersionList(data=[VersionResource.model_validate(version) for version in reply.json()["data"]])


async def _worker(parts: Context, worker: str) -> WorkerResource:
    for candidate in parts.live.workers():
        if candidate.id == worker:
            return live_worker(candidate)
    return past_worker(await workers.get(parts.sessions, worker))
