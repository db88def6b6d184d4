"""gRPC Jobs: the same jobs, errors as status codes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable
from pathlib import Path

import grpc
import grpc.aio
import pytest
from rlharvest import rpc
from rlharvest.v1 import jobs_pb2, jobs_pb2_grpc
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.rpc_jobs import NAME, JobsServicer
from rlharvest_coordinator.sql import Sessions

from .conftest import FakeLive, spec


@pytest.fixture
async def stub(sessions: Sessions, live: FakeLive, tmp_path: Path) -> AsyncIterator[jobs_pb2_grpc.JobsAsyncStub]:
    server = rpc.Server()
    server.add(NAME, jobs_pb2_grpc.add_JobsServicer_to_server, JobsServicer(Jobs(sessions, live, checkpoints=tmp_path)))
    await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        yield jobs_pb2_grpc.JobsStub(channel)
    await server.close(0)


async def test_jobs_are_created_once_listed_and_cancelled(stub: jobs_pb2_grpc.JobsAsyncStub) -> None:
    request = jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec()), idempotency_key="k")
    job = await stub.Create(request)
    assert (await stub.Create(request)).id == job.id
    assert json.loads(job.job_json)["object"] == "rl.job"
    assert [one.id for one in (await stub.List(jobs_pb2.ListJobsRequest())).jobs] == [job.id]
    assert (await stub.Cancel(jobs_pb2.JobVerb(id=job.id))).status == "cancelled"
    assert (await stub.Get(jobs_pb2.GetJobRequest(id=job.id))).status == "cancelled"


async def test_errors_are_status_codes_with_the_message(stub: jobs_pb2_grpc.JobsAsyncStub, live: FakeLive) -> None:
    async def refused(call: Awaitable[jobs_pb2.Job]) -> tuple[grpc.StatusCode, str | None]:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call
        return error.value.code(), error.value.details()

    code, details = await refused(stub.Create(jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec(seed=-1)))))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert (details or "").startswith("seed = -1: ")
    assert (await refused(stub.Create(jobs_pb2.CreateJobRequest(spec_json="{"))))[0] is grpc.StatusCode.INVALID_ARGUMENT
    assert (await refused(stub.Get(jobs_pb2.GetJobRequest(id="x"))))[0] is grpc.StatusCode.NOT_FOUND
    job = await stub.Create(jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec())))
    assert (await refused(stub.Resume(jobs_pb2.JobVerb(id=job.id))))[0] is grpc.StatusCode.ABORTED
    live.leading = False
    code, details = await refused(stub.Cancel(jobs_pb2.JobVerb(id=job.id)))
    assert (code, details) == (grpc.StatusCode.FAILED_PRECONDITION, rpc.NOT_LEADER)
