"""/v1/fine_tuning/jobs: the routes of api.openai's mapping."""

from __future__ import annotations

from fastapi import APIRouter, Request

from rlharvest_coordinator.api import body, openai
from rlharvest_coordinator.api.context import ERRORS, After, IdempotencyKey, JobId, Limit, Parts
from rlharvest_coordinator.api.resources import ListOf, listed
from rlharvest_coordinator.store import checkpoints, events, jobs

router = APIRouter(prefix="/v1/fine_tuning/jobs", tags=["OpenAI"], responses=ERRORS)

_BODY = {
    "requestBody": {
        "required": True,
        "content": {
            "application/json": {
                "schema": {
                    "type": "object",
                    "required": ["model", "training_file", "method"],
                    "properties": {
                        "model": {"type": "string"},
                        "training_file": {"type": "string", "description": "Path of a dataset, as dataset.path."},
                        "method": {
                            "type": "object",
                            "required": ["type"],
                            "properties": {
                                "type": {"const": "reinforcement"},
                                "reinforcement": {
                                    "type": "object",
                                    "properties": {"grader": {"type": "object"}, "hyperparameters": {"type": "object"}},
                                },
                            },
                        },
                        "seed": {"type": "integer"},
                        "suffix": {"type": "string", "description": "Name of the job."},
                        "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                        "rlharvest": {"type": "object", "description": "Any other field of a job (see JobSpec)."},
                    },
                }
            }
        },
    }
}


@router.post("", openapi_extra=_BODY)
async def create_fine_tuning_job(
    request: Request, parts: Parts, idempotency_key: IdempotencyKey = None
) -> openai.OpenAIJob:
    """Create a job, in OpenAI's words."""
    values = openai.spec(await body.mapping(request))
    return openai.job((await parts.jobs.create(values, idempotency_key))[0])


@router.get("")
async def list_fine_tuning_jobs(parts: Parts, limit: Limit = 20, after: After = None) -> ListOf[openai.OpenAIJob]:
    """List jobs, newest first."""
    found = await parts.jobs.listing(limit=limit, after=after)
    return listed([openai.job(resource) for resource in found.data], found.has_more)


@router.get("/{job}")
async def get_fine_tuning_job(job: JobId, parts: Parts) -> openai.OpenAIJob:
    """Read a job."""
    return openai.job(await parts.jobs.get(job))


@router.post("/{job}/cancel")
async def cancel_fine_tuning_job(job: JobId, parts: Parts) -> openai.OpenAIJob:
    """End a job."""
    return openai.job(await parts.jobs.cancel(job))


@router.post("/{job}/pause")
async def pause_fine_tuning_job(job: JobId, parts: Parts) -> openai.OpenAIJob:
    """Pause a job."""
    return openai.job(await parts.jobs.pause(job))


@router.post("/{job}/resume")
async def resume_fine_tuning_job(job: JobId, parts: Parts) -> openai.OpenAIJob:
    """Go on with a paused job."""
    return openai.job(await parts.jobs.resume(job))


@router.get("/{job}/events")
async def list_fine_tuning_events(
    job: JobId, parts: Parts, limit: Limit = 20, after: After = None
) -> ListOf[openai.OpenAIEvent]:
    """List the events of a job, newest first."""
    await jobs.get(parts.sessions, job)
    before = await events.number(parts.sessions, job, after) if after is not None else None
    found = await events.newest(parts.sessions, job, limit=limit, before=before)
    return listed([openai.event(row) for row in found.rows], found.has_more)


@router.get("/{job}/checkpoints")
async def list_fine_tuning_checkpoints(
    job: JobId, parts: Parts, limit: Limit = 10, after: After = None
) -> ListOf[openai.OpenAICheckpoint]:
    """List the checkpoints of a job, newest first."""
    await jobs.get(parts.sessions, job)
    found = await checkpoints.listing(parts.sessions, job, limit=limit, after=after)
    return listed([openai.checkpoint(row) for row in found.rows], found.has_more)
