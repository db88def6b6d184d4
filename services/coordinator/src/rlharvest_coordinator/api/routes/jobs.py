"""/v1/jobs: create, list, read, the verbs, curves, checkpoints."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response
from rlharvest.jobs.state import Status

from rlharvest_coordinator.api import body
from rlharvest_coordinator.api.context import ERRORS, After, IdempotencyKey, JobId, Limit, Parts
from rlharvest_coordinator.api.resources import (
    CheckpointResource,
    DeletedJob,
    JobResource,
    ListOf,
    MetricsResource,
    checkpoint_resource,
    listed,
)
from rlharvest_coordinator.store import checkpoints, jobs, steps

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], responses=ERRORS)

MOST_POINTS, POINTS = 100_000, 10_000
"""Of each curve: at most, and unless asked for another number."""

_SPEC = {"schema": {"$ref": "#/components/schemas/JobSpec"}}
_BODY: dict[str, Any] = {
    "requestBody": {"required": True, "content": {"application/json": _SPEC, "application/yaml": _SPEC}}
}


@router.post(
    "", status_code=201, openapi_extra=_BODY, responses={200: {"model": JobResource, "description": "A replay."}}
)
async def create_job(
    request: Request, response: Response, parts: Parts, idempotency_key: IdempotencyKey = None
) -> JobResource:
    """Create a job, from JSON or YAML. It starts in `validating`; follow its events to see it go on."""
    values = await body.mapping(request, yaml_too=True)
    job, new = await parts.jobs.create(values, idempotency_key)
    response.status_code = 201 if new else 200
    response.headers["Location"] = f"{request.scope.get('root_path', '')}/v1/jobs/{job.id}"
    return job


@router.get("")
async def list_jobs(
    parts: Parts,
    limit: Limit = 20,
    after: After = None,
    status: Annotated[Status | None, Query(description="Only jobs in this status.")] = None,
) -> ListOf[JobResource]:
    """List jobs, newest first."""
    return await parts.jobs.listing(limit=limit, after=after, status=status)


@router.get("/{job}")
async def get_job(job: JobId, parts: Parts) -> JobResource:
    """Read a job."""
    return await parts.jobs.get(job)


@router.delete("/{job}")
async def delete_job(
    job: JobId,
    parts: Parts,
    checkpoints: Annotated[bool, Query(description="Also the files of its checkpoints.")] = False,
) -> DeletedJob:
    """Delete a job that has ended, with its records and its versions of weights. Checkpoints stay unless asked for."""
    return await parts.jobs.delete(job, checkpoints=checkpoints)


@router.post("/{job}/cancel")
async def cancel_job(job: JobId, parts: Parts) -> JobResource:
    """End a job. Cancelling twice is the same as once."""
    return await parts.jobs.cancel(job)


@router.post("/{job}/pause")
async def pause_job(job: JobId, parts: Parts) -> JobResource:
    """Pause a job: responses are handed back, the trainer saves. Pausing twice is the same as once."""
    return await parts.jobs.pause(job)


@router.post("/{job}/resume")
async def resume_job(job: JobId, parts: Parts) -> JobResource:
    """Go on with a paused job, where it stopped."""
    return await parts.jobs.resume(job)


@router.get("/{job}/metrics")
async def get_metrics(
    job: JobId,
    parts: Parts,
    names: Annotated[str | None, Query(max_length=16384, description="Comma-separated; unset: all.")] = None,
    from_step: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
    max_points: Annotated[int, Query(ge=1, le=MOST_POINTS, description="Thin the curves out to this many.")] = POINTS,
) -> MetricsResource:
    """Read the curves of a job: reward, loss and the rest, by optimizer step."""
    await jobs.get(parts.sessions, job)
    wanted = [name.strip() for name in names.split(",") if name.strip()] if names is not None else None
    curves = await steps.curves(parts.sessions, job, names=wanted, from_step=from_step, max_points=max_points)
    return MetricsResource(job=job, steps=curves.steps, series=curves.series)


@router.get("/{job}/checkpoints")
async def list_checkpoints(
    job: JobId, parts: Parts, limit: Limit = 20, after: After = None
) -> ListOf[CheckpointResource]:
    """List the checkpoints of a job, newest first."""
    await jobs.get(parts.sessions, job)
    found = await checkpoints.listing(parts.sessions, job, limit=limit, after=after)
    return listed([checkpoint_resource(row) for row in found.rows], found.has_more)
