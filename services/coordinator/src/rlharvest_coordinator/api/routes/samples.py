"""/v1/jobs/{job}/samples: responses with text, tokens, versions and who generated what."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Path, Query
from rlharvest.errors import NotFound
from rlharvest.ids import parse_response_id

from rlharvest_coordinator.api.context import ERRORS, After, JobId, Limit, Parts
from rlharvest_coordinator.api.resources import (
    ListOf,
    SampleResource,
    SampleSummary,
    listed,
    sample_resource,
    sample_summary,
)
from rlharvest_coordinator.store import jobs, samples

router = APIRouter(prefix="/v1/jobs", tags=["samples"], responses=ERRORS)


@router.get("/{job}/samples")
async def list_samples(
    job: JobId,
    parts: Parts,
    limit: Limit = 20,
    after: After = None,
    step: Annotated[int | None, Query(ge=0, le=2**31 - 1, description="Only the batch of this optimizer step.")] = None,
    min_reward: Annotated[
        float | None, Query(allow_inf_nan=False, description="Only with at least this reward.")
    ] = None,
    state: Annotated[
        Literal["finished", "live"], Query(description="`live`: those that are still being generated or scored.")
    ] = "finished",
) -> ListOf[SampleSummary]:
    """List responses without their tokens, newest first."""
    await jobs.get(parts.sessions, job)
    if state == "live":
        found = [SampleResource.model_validate(sample) for sample in await parts.live.live_samples(job, limit)]
        return listed([summary(sample) for sample in found], False)
    page = await samples.listing(parts.sessions, job, limit=limit, after=after, step=step, min_reward=min_reward)
    return listed([sample_summary(row.sample, row.group) for row in page.rows], page.has_more)


@router.get("/{job}/samples/{response}")
async def get_sample(
    job: JobId, response: Annotated[str, Path(description="Identifier of a response, resp_….")], parts: Parts
) -> SampleResource:
    """Read a response with its tokens, also one that is still being generated."""
    await jobs.get(parts.sessions, job)
    found = await samples.get(parts.sessions, job, response)
    if found is not None:
        return sample_resource(found.sample, found.group)
    live = await parts.live.live_sample(job, parse_response_id(response)[1])
    if live is None:
        raise NotFound(f"there is no response {response!r}: it was dropped, or never made")
    return SampleResource.model_validate(live)


def summary(sample: SampleResource) -> SampleSummary:
    """Return a response without its tokens."""
    return SampleSummary(**{name: getattr(sample, name) for name in SampleSummary.model_fields})
