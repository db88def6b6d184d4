"""Every call that changes something, or was to, leaves a record: who, what, of which job, from where, with what result."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from fastapi.routing import APIRoute
from rlharvest import rpc
from rlharvest.credentials import Tokens
from rlharvest.v1 import jobs_pb2, jobs_pb2_grpc
from rlharvest_coordinator.api import audit
from rlharvest_coordinator.api.guard import SAFE, session_value
from rlharvest_coordinator.api.jobs import Jobs
from rlharvest_coordinator.api.rpc_jobs import NAME, JobsServicer
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import audit as store

from .conftest import FakeLive, MakeApp, spec

TOKEN = "a-long-token-of-the-api"


@pytest.fixture
async def locked(make_app: MakeApp) -> AsyncIterator[httpx.AsyncClient]:
    transport = httpx.ASGITransport(make_app(token=TOKEN), raise_app_exceptions=False, client=("10.1.2.3", 4711))
    headers = {"Authorization": f"Bearer {TOKEN}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://rl.example", headers=headers) as http:
        yield http


async def records(http: httpx.AsyncClient, **query: Any) -> list[dict[str, Any]]:
    reply = await http.get("/v1/audit", params=query)
    assert reply.status_code == 200, reply.text
    return list(reply.json()["data"])


async def test_every_call_that_changes_something_is_recorded(locked: httpx.AsyncClient) -> None:
    job = (await locked.post("/v1/jobs", json=spec())).json()["id"]
    for verb in ("pause", "resume", "cancel"):
        await locked.post(f"/v1/jobs/{job}/{verb}")
    await locked.delete(f"/v1/jobs/{job}")
    found = await records(locked)
    assert [(row["action"], row["subject"]) for row in reversed(found)] == [
        ("create_job", job),
        ("pause_job", job),
        ("resume_job", job),
        ("cancel_job", job),
        ("delete_job", job),
    ]
    assert {(row["who"], row["address"], row["protocol"]) for row in found} == {
        (audit.name_of(TOKEN), "10.1.2.3", "rest")
    }
    assert [row["done"] for row in found] == [row["result"] in ("200", "201") for row in found]
    assert TOKEN not in json.dumps(found)
    assert await records(locked, subject="rljob_other") == []
    assert len(await records(locked, subject=job, limit=2)) == 2


async def test_the_openai_mapping_is_recorded_too(locked: httpx.AsyncClient) -> None:
    grader = {
        "type": "string_check",
        "name": "g",
        "input": "{{sample.output_text}}",
        "reference": "x",
        "operation": "eq",
    }
    body = {
        "model": "m",
        "training_file": "d.jsonl",
        "method": {"type": "reinforcement", "reinforcement": {"grader": grader}},
    }
    reply = await locked.post("/v1/fine_tuning/jobs", json=body)
    (record,) = await records(locked)
    assert record["action"] == "create_fine_tuning_job"
    assert record["result"] == str(reply.status_code)
    assert record["subject"] == (reply.json()["id"] if reply.status_code == 200 else None)


async def test_what_was_refused_is_recorded_with_its_result(locked: httpx.AsyncClient, live: FakeLive) -> None:
    await locked.post("/v1/jobs", json=spec(seed=-1))
    await locked.post("/v1/jobs/rljob_none/cancel")
    await locked.post("/v1/workers/wkr_none/drain")
    live.leading = False
    await locked.post("/v1/jobs", json=spec())
    found = [(row["action"], row["subject"], row["result"], row["done"]) for row in reversed(await records(locked))]
    assert found == [
        ("create_job", None, "400", False),
        ("cancel_job", "rljob_none", "404", False),
        ("drain_worker", "wkr_none", "404", False),
        ("create_job", None, "503", False),
    ]


async def test_reading_is_not_recorded_and_strangers_do_not_fill_the_database(locked: httpx.AsyncClient) -> None:
    await locked.get("/v1/jobs")
    for headers in ({"Authorization": "Bearer wrong"}, {"Authorization": ""}, {"Origin": "http://evil.example"}):
        reply = await locked.post("/v1/jobs", json=spec(), headers=headers)
        assert reply.status_code in (401, 403)
    await locked.post("/v1/none")
    assert await records(locked) == []
    assert (await locked.get("/v1/audit", headers={"Authorization": ""})).status_code == 401


async def test_a_browser_is_known_by_the_token_it_logged_in_with(locked: httpx.AsyncClient) -> None:
    headers = {"Authorization": "", "Cookie": f"rlharvest_session={session_value(TOKEN)}"}
    await locked.post("/v1/jobs/rljob_none/cancel", headers=headers)
    (record,) = await records(locked)
    assert record["who"] == audit.name_of(TOKEN)


async def test_without_a_token_anyone_is_who_it_was(client: httpx.AsyncClient) -> None:
    await client.post("/v1/jobs", json=spec())
    (record,) = await records(client)
    assert record["who"] == "anyone"


async def test_a_deleted_job_keeps_its_records_and_has_no_others(locked: httpx.AsyncClient) -> None:
    job = (await locked.post("/v1/jobs", json=spec())).json()["id"]
    await locked.post(f"/v1/jobs/{job}/cancel")
    assert (await locked.delete(f"/v1/jobs/{job}")).status_code == 200
    assert len(await records(locked, subject=job)) == 3
    assert (await locked.get("/v1/jobs/audit/events")).status_code == 404


async def test_grpc_is_recorded_too(sessions: Sessions, live: FakeLive, tmp_path: Path) -> None:
    jobs = Jobs(sessions, live, checkpoints=tmp_path)
    server = rpc.Server()
    server.add(NAME, jobs_pb2_grpc.add_JobsServicer_to_server, JobsServicer(jobs, Tokens([TOKEN])))
    await server.start("127.0.0.1:0")
    async with grpc.aio.insecure_channel(f"127.0.0.1:{server.port}") as channel:
        stub: jobs_pb2_grpc.JobsAsyncStub = jobs_pb2_grpc.JobsStub(channel)
        metadata = (("authorization", f"Bearer {TOKEN}"),)
        job = await stub.Create(jobs_pb2.CreateJobRequest(spec_json=json.dumps(spec())), metadata=metadata)
        with pytest.raises(grpc.aio.AioRpcError):
            await stub.Cancel(jobs_pb2.JobVerb(id="rljob_none"))
        await stub.Get(jobs_pb2.GetJobRequest(id=job.id))
    await server.close(0)
    found = (await store.newest(sessions, limit=10)).rows[::-1]
    assert [(row.who, row.action, row.subject, row.result) for row in found] == [
        (audit.name_of(TOKEN), "create_job", job.id, "OK"),
        ("unknown", "cancel_job", "rljob_none", "NotFound"),
    ]
    assert all(row.address.startswith("ipv4:127.0.0.1:") for row in found)


def test_no_route_that_changes_something_is_left_out(make_app: MakeApp) -> None:
    """The middleware is around all of them: a method that may change something is never among the safe ones."""
    app = make_app()
    changing = {route.name for route in app.routes if isinstance(route, APIRoute) and route.methods - set(SAFE)}
    assert changing >= {"create_job", "cancel_job", "pause_job", "resume_job", "delete_job", "drain_worker"}
    assert app.user_middleware[0].cls is audit.Audit


async def test_only_the_newest_records_stay(sessions: Sessions, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "MOST", 3)
    monkeypatch.setattr(store, "SWEEP", 1)
    for number in range(7):
        await store.append(
            sessions,
            store.Record(
                at=float(number),
                who="w",
                address="a",
                protocol="rest",
                action="a",
                subject=None,
                result="200",
                done=True,
            ),
        )
    assert [row.at for row in (await store.newest(sessions, limit=10)).rows] == [6.0, 5.0, 4.0]
