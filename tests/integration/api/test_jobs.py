"""Jobs over REST: create once, read, list, verbs, delete."""

from __future__ import annotations

import asyncio

import httpx
import pytest
import yaml
from rlharvest.jobs.state import Move
from rlharvest_coordinator.live import LiveJob
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import checkpoints, jobs, steps

from .conftest import FakeLive, spec


async def test_a_job_is_created_shown_and_woken(client: httpx.AsyncClient, live: FakeLive) -> None:
    reply = await client.post("/v1/jobs", json=spec(name="first"))
    assert reply.status_code == 201
    job = reply.json()
    assert reply.headers["location"] == f"/v1/jobs/{job['id']}"
    assert (job["object"], job["status"], job["status_detail"]["reason"]) == ("rl.job", "validating", "Validating")
    assert job["spec"]["sampling"]["num_generations"] == 8, "defaults are filled in"
    assert live.woken == [job["id"]]
    assert (await client.get(reply.headers["location"])).json() == job


async def test_yaml_and_names_of_other_tools_are_taken(client: httpx.AsyncClient) -> None:
    text = yaml.safe_dump(spec(num_generations=4, name="ünï"), allow_unicode=True)
    reply = await client.post("/v1/jobs", content=text.encode(), headers={"Content-Type": "application/yaml"})
    assert reply.status_code == 201
    assert (reply.json()["spec"]["sampling"]["num_generations"], reply.json()["name"]) == (4, "ünï")


async def test_twenty_posts_with_one_key_make_one_job(client: httpx.AsyncClient) -> None:
    headers = {"Idempotency-Key": "k"}
    replies = await asyncio.gather(*(client.post("/v1/jobs", json=spec(), headers=headers) for _ in range(20)))
    assert sorted(reply.status_code for reply in replies) == [200] * 19 + [201]
    assert len({reply.json()["id"] for reply in replies}) == 1
    other = await client.post("/v1/jobs", json=spec(seed=1), headers=headers)
    assert (other.status_code, other.json()["error"]["code"]) == (409, "conflict")
    assert len((await client.get("/v1/jobs")).json()["data"]) == 1


@pytest.mark.parametrize(
    ("body", "kind", "status", "param"),
    [
        (b"{", "application/json", 400, "body"),
        (b"[1]", "application/json", 400, "body"),
        (b"\xff", "application/json", 400, "body"),
        (b'{"seed": NaN}', "application/json", 400, "body"),
        (b"a: [", "application/yaml", 400, "body"),
        (b"a: &x [1]\nb: *x", "application/yaml", 400, "body"),
        (b"a: !!python/object:os.system {}", "application/yaml", 400, "body"),
        (b"x", "text/plain", 415, None),
        (b"{}", "application/json", 400, "model"),
        (b'{"model": "m", "dataset": {"path": ""}, "rewards": []}', "application/json", 400, "dataset.path"),
    ],
)
async def test_a_bad_body_names_what_is_wrong(
    client: httpx.AsyncClient, body: bytes, kind: str, status: int, param: str | None
) -> None:
    reply = await client.post("/v1/jobs", content=body, headers={"Content-Type": kind})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (status, param), error


async def test_a_bad_key_is_refused(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/jobs", json=spec(), headers={"Idempotency-Key": "x" * 256})
    assert reply.json()["error"]["param"] == "Idempotency-Key"


async def test_lists_go_on_behind_a_cursor(client: httpx.AsyncClient) -> None:
    ids = [(await client.post("/v1/jobs", json=spec(seed=seed))).json()["id"] for seed in range(5)]
    first = (await client.get("/v1/jobs", params={"limit": 3})).json()
    assert (first["has_more"], first["last_id"]) == (True, first["data"][-1]["id"])
    rest = (await client.get("/v1/jobs", params={"limit": 3, "after": first["last_id"]})).json()
    assert not rest["has_more"]
    assert sorted(job["id"] for job in first["data"] + rest["data"]) == sorted(ids)
    none = (await client.get("/v1/jobs", params={"status": "running"})).json()
    assert none == {"object": "list", "data": [], "first_id": None, "last_id": None, "has_more": False}


async def test_verbs_follow_the_life_of_a_job(client: httpx.AsyncClient, sessions: Sessions, live: FakeLive) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    paused = await client.post(f"/v1/jobs/{job}/pause")
    assert (paused.status_code, paused.json()["error"]["code"]) == (409, "conflict")
    await jobs.move(sessions, job, Move.VALIDATED, now=1.0)
    assert (await client.get(f"/v1/jobs/{job}")).json()["queue_position"] == 0
    for verb, status in (("pause", "paused"), ("pause", "paused"), ("resume", "queued"), ("cancel", "cancelled")):
        reply = await client.post(f"/v1/jobs/{job}/{verb}")
        assert (reply.status_code, reply.json()["status"]) == (200, status)
    assert (await client.post(f"/v1/jobs/{job}/cancel")).status_code == 200, "cancelling twice is the same as once"
    assert (await client.post(f"/v1/jobs/{job}/resume")).status_code == 409
    assert live.woken.count(job) == 6


async def test_only_an_ended_job_is_deleted(client: httpx.AsyncClient) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    refused = await client.delete(f"/v1/jobs/{job}")
    assert refused.status_code == 409
    assert "cancel it first" in refused.json()["error"]["message"]
    await client.post(f"/v1/jobs/{job}/cancel")
    deleted = {"id": job, "object": "rl.job.deleted", "deleted": True, "checkpoints": None}
    assert (await client.delete(f"/v1/jobs/{job}")).json() == deleted
    assert (await client.get(f"/v1/jobs/{job}")).status_code == 404


async def test_a_coordinator_that_does_not_lead_reads_and_writes_nothing(
    client: httpx.AsyncClient, live: FakeLive
) -> None:
    live.leading = False
    reply = await client.post("/v1/jobs", json=spec())
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "not_leader")
    assert "retry-after" in reply.headers
    assert (await client.get("/v1/jobs")).status_code == 200
    ready = await client.get("/readyz")
    assert (ready.status_code, list(ready.json()["failed"])) == (503, ["leading"])


async def test_a_running_job_shows_what_the_ledger_says(
    client: httpx.AsyncClient, sessions: Sessions, live: FakeLive
) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    await jobs.move(sessions, job, Move.VALIDATED, now=1.0)
    await jobs.claim(sessions, trainer="t", now=2.0)
    live.running[job] = LiveJob(
        reason="WaitingForWorkers",
        message="0 ready workers",
        pending=3,
        running=0,
        finished=0,
        admitted_groups=1,
        workers_ready=0,
        counters={"generated_tokens": 7, "preemptions": 2},
        waiting_for=["resp_1"],
    )
    shown = (await client.get(f"/v1/jobs/{job}")).json()
    assert shown["status_detail"]["reason"] == "WaitingForWorkers"
    assert (shown["progress"]["generated_tokens"], shown["workers"]["lost_total"]) == (7, 2)
    assert shown["responses"]["pending"] == 3


async def test_curves_and_checkpoints(client: httpx.AsyncClient, sessions: Sessions) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    for step in range(10):
        metrics = {"reward": step / 10, "kl": float("nan")}
        await steps.record(sessions, job, step, version=step, digest="d", fence=0, metrics=metrics, now=1.0)
    thinned = (await client.get(f"/v1/jobs/{job}/metrics", params={"names": "reward", "max_points": 4})).json()
    assert thinned["steps"] == [0, 3, 6, 9]
    assert thinned["series"] == {"reward": [0.0, 0.3, 0.6, 0.9]}
    whole = (await client.get(f"/v1/jobs/{job}/metrics", params={"from_step": 8})).json()
    assert whole["series"] == {"kl": [None, None], "reward": [0.8, 0.9]}
    for step in (5, 9):
        await checkpoints.record(sessions, job, step, version=step, path=f"c{step}", digest="d", metrics={}, now=1.0)
    listed = (await client.get(f"/v1/jobs/{job}/checkpoints", params={"limit": 1})).json()
    assert ([row["step"] for row in listed["data"]], listed["has_more"]) == ([9], True)
    assert (await client.get(f"/v1/jobs/{job}")).json()["latest_checkpoint"] == "c9"
    assert (await client.get("/v1/jobs")).json()["data"][0]["latest_checkpoint"] == "c9"
