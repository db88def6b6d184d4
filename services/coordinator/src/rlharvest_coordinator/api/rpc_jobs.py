"""gRPC Jobs: the same object as REST.

Errors, as rlharvest.rpc_faults answers them: InvalidField and other DataErrors are INVALID_ARGUMENT with the field, the
value and the fix; NotFound is NOT_FOUND; Conflict ABORTED; not leading FAILED_PRECONDITION with rpc.NOT_LEADER, so that
clients go to the next address.
"""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from typing import Any

import grpc.aio
from rlharvest.credentials import Tokens
from rlharvest.errors import InvalidField
from rlharvest.v1 import jobs_pb2, jobs_pb2_grpc

from rlharvest_coordinator.api import audit
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.resources import JobResource
from rlharvest_coordinator.store.values import finite

NAME = "rlharvest.v1.Jobs"
_MOST = 1000

Context = grpc.aio.ServicerContext[Any, Any]


class JobsServicer(jobs_pb2_grpc.JobsServicer):
    """Serves rlharvest.v1.Jobs."""

    def __init__(self, jobs: Jobs, tokens: Tokens | None = None) -> None:
        """`tokens` are those of the API; records of the audit name the one that called."""
        self.jobs = jobs
        self._tokens = tokens

    async def Create(self, request: jobs_pb2.CreateJobRequest, context: Context) -> jobs_pb2.Job:
        async with self._recorded("create_job", context):
            return _message((await self.jobs.create(_spec(request.spec_json), request.idempotency_key or None))[0])

    async def Get(self, request: jobs_pb2.GetJobRequest, context: Context) -> jobs_pb2.Job:
        return _message(await self.jobs.get(request.id))

    async def List(self, request: jobs_pb2.ListJobsRequest, context: Context) -> jobs_pb2.ListJobsReply:
        found = await self.jobs.listing(limit=min(request.limit or 20, _MOST), after=request.after or None)
        return jobs_pb2.ListJobsReply(jobs=[_message(job) for job in found.data], has_more=found.has_more)

    async def Cancel(self, request: jobs_pb2.JobVerb, context: Context) -> jobs_pb2.Job:
        async with self._recorded("cancel_job", context, request.id):
            return _message(await self.jobs.cancel(request.id))

    async def Pause(self, request: jobs_pb2.JobVerb, context: Context) -> jobs_pb2.Job:
        async with self._recorded("pause_job", context, request.id):
            return _message(await self.jobs.pause(request.id))

    async def Resume(self, request: jobs_pb2.JobVerb, context: Context) -> jobs_pb2.Job:
        async with self._recorded("resume_job", context, request.id):
            return _message(await self.jobs.resume(request.id))

    def _recorded(self, action: str, context: Context, job: str | None = None) -> AbstractAsyncContextManager[None]:
        return audit.grpc_call(self.jobs.sessions, self.jobs.clock, self._tokens, context, action=action, subject=job)


def _spec(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidField("spec_json", text, f"not JSON: {error}", "Send a JSON object.") from error


def _message(job: JobResource) -> jobs_pb2.Job:
    text = json.dumps(finite(job.model_dump()), allow_nan=False)
    return jobs_pb2.Job(id=job.id, status=job.status, job_json=text)
