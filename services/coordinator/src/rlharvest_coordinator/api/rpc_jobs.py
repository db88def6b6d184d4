"""gRPC Jobs: the same object as REST.

Errors: InvalidField and other DataErrors are INVALID_ARGUMENT with the field, the value and the fix; NotFound is
NOT_FOUND; Conflict ABORTED; not leading FAILED_PRECONDITION with rpc.NOT_LEADER, so that clients go to the next address.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import grpc
import grpc.aio
from rlharvest import rpc
from rlharvest.errors import (
    Conflict,
    DataError,
    Fenced,
    InfrastructureError,
    InvalidField,
    NotFound,
    NotLeader,
    RlharvestError,
)
from rlharvest.v1 import jobs_pb2, jobs_pb2_grpc

from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.resources import JobResource
from rlharvest_coordinator.store.values import finite

NAME = "rlharvest.v1.Jobs"
_MOST = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Serves rlharvest.v1.Jobs."""

    def __init__(self, jobs: Jobs) -> None:
        self.jobs = jobs

    async def Create(self, request: jobs_pb2.CreateJobRequest, context: Context) -> jobs_pb2.Job:
        async def create() -> JobResource:
            try:
                values = json.loads(request.spec_json)
            except ValueError as error:
                raise InvalidField(
                    "spec_json", request.spec_json, f"not JSON: {error}", "Send a JSON object."
                ) from error
            return (await self.jobs.create(values, request.idempotency_key or None))[0]

        return await _one(context, create)

    async def Get(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.Job:
        return await _one(context, lambda: self.jobs.get(request.id))

    async def List(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsReply:
        try:
            limit = min(request.limit or 20, _MOST)
            found = await self.jobs.listing(limit=limit, after=request.after or None)
        except RlharvestError as error:
            await _abort(context, error)
        return jobs_pb2.ListJobsReply(jobs=[_message(job) for job in found.data], has_more=found.has_more)

    async def Cancel(self, request: jobs_pb2.JobVerb, context: Context) -> jobs_pb2.Job:
        return await _one(context, lambda: self.jobs.cancel(request.id))

    async def Pause(self, request: jobs_pb2.JobVerb, context: Context) -> jobs_pb2.Job:
        return await _one(context, lambda: self.jobs.pause(request.id))

    async def Resume(self, request: jobs_pb2.JobVerb, context: Context) -> jobs_pb2.Job:
        return await _one(context, lambda: self.jobs.resume(request.id))


async def _one(context: Context, call: Callable[[], Awaitable[JobResource]]) -> jobs_pb2.Job:
    try:
        return _message(await call())
    except RlharvestError as error:
        await _abort(context, error)


def _message(job: JobResource) -> jobs_pb2.Job:
    text = json.dumps(finite(job.model_dump()), allow_nan=False)
    return jobs_pb2.Job(id=job.id, status=job.status, job_json=text)


async def _abort(context: Context, error: RlharvestError) -> NoReturn:
    match error:
        case DataError():
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        case NotFound():
            await context.abort(grpc.StatusCode.NOT_FOUND, str(error))
        case Conflict():
            await context.abort(grpc.StatusCode.ABORTED, str(error))
        case NotLeader() | Fenced():
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, rpc.NOT_LEADER)
        case InfrastructureError():
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        case _:
            await context.abort(grpc.StatusCode.INTERNAL, str(error))
