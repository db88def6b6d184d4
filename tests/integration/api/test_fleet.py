"""Workers, weights and samples over REST."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from rlharvest.ids import response_id
from rlharvest.spans import ids_bytes
from rlharvest_coordinator.live import LiveWorker
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import workers
from rlharvest_coordinator.tables import Group, Sample

from .conftest import FakeLive, MakeApp, spec


def worker(name: str, **changes: Any) -> LiveWorker:
    values: dict[str, Any] = {
        "id": name, "incarnation": 2**60, "state": "ready", "job": None, "version": 3, "slots": 8, "held": 2,
        "tokens_per_s": float("inf"), "generated_tokens": 9, "heartbeat_age_s": 0.1, "note": "", "hostname": "h", "pid": 1,
        "worker_class": "preemptible", "worker_type": "", "engines": ("stub",), "numerics_key": "k",
        "batch_invariant": True, "joined_at": 1.0,
    }  # fmt: skip
    return LiveWorker(**{**values, **changes})


async def test_workers_are_those_here_and_those_that_left(
    client: httpx.AsyncClient, sessions: Sessions, live: FakeLive
) -> None:
    live.here.append(worker("wkr_a"))
    for name in ("wkr_a", "wkr_b"):
        await workers.join(sessions, name, 1, now=1.0, state="gone", worker_class="preemptible", hostname="h", pid=1,
                           engines=[], slots=1)  # fmt: skip
    listed = (await client.get("/v1/workers")).json()["data"]
    assert [row["id"] for row in listed] == ["wkr_a", "wkr_b"]
    assert listed[0]["incarnation"] == str(2**60), "a u64 does not fit into a JSON number"
    assert listed[0]["tokens_per_s"] is None, "JSON has no infinity"
    assert len((await client.get("/v1/workers", params={"gone": False})).json()["data"]) == 1
    assert (await client.get("/v1/workers/wkr_b")).json()["state"] == "gone"


async def test_drain_passes_the_reason_on(client: httpx.AsyncClient, live: FakeLive) -> None:
    live.here.append(worker("wkr_a"))
    reply = await client.post("/v1/workers/wkr_a/drain", json={"reason": "spot notice"})
    assert (reply.status_code, reply.json()["id"]) == (202, "wkr_a")
    await client.post("/v1/workers/wkr_a/drain")
    assert live.drained == [("wkr_a", "spot notice"), ("wkr_a", "asked by a user")]
    assert (await client.post("/v1/workers/wkr_a/drain", json={"why": 1})).json()["error"]["param"] == "why"


@pytest.fixture
async def weights(make_app: MakeApp) -> AsyncIterator[tuple[httpx.AsyncClient, dict[str, httpx.Response | None]]]:
    """A client of an application whose weight service answers what the test puts into `replies["next"]`."""
    replies: dict[str, httpx.Response | None] = {"next": None}

    def answer(request: httpx.Request) -> httpx.Response:
        reply = replies["next"]
        if reply is None:
            raise httpx.ConnectError("refused", request=request)
        return reply

    http = httpx.AsyncClient(transport=httpx.MockTransport(answer))
    app = make_app(http=http)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://127.0.0.1") as client:
        yield client, replies


async def test_versions_come_from_the_weight_service(
    weights: tuple[httpx.AsyncClient, dict[str, httpx.Response | None]],
) -> None:
    client, replies = weights
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    down = await client.get(f"/v1/weights/{job}")
    assert (down.status_code, down.json()["error"]["code"]) == (503, "unavailable")
    version = {"version": 0, "step": 0, "parent": None, "digest": "d", "bytes": 1, "created_at": 1.0}
    replies["next"] = httpx.Response(200, json={"object": "list", "data": [version]})
    assert (await client.get(f"/v1/weights/{job}")).json()["data"] == [version]
    replies["next"] = httpx.Response(404)
    assert (await client.get(f"/v1/weights/{job}")).json()["data"] == []


async def test_samples_show_tokens_versions_and_who_generated_them(
    client: httpx.AsyncClient, sessions: Sessions, live: FakeLive
) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    attempt = (1 << 32) + 2
    async with sessions.begin() as session:
        session.add(Group(job=job, ordinal=0, state="trained", step=4, position=0, prompt=0, data_epoch=0, tokens=3,
                          staleness=1, at=1.0))  # fmt: skip
        session.add(
            Sample(job=job, handle=7, response_id=response_id(job, 7), group=0, finish="eos", ids=ids_bytes([5, 6, 7]),
                   logprobs=b"\x00\x00\x80\xbf" * 3, runs=[[2, 3], [1, 4]],
                   pieces=[[0, 2, "1", "wkr_a"], [2, 1, str(attempt), "wkr_b"]], prompt_text="p <b>", text="t",
                   reward=0.5, components=[["exact_match", None, 1.0]], at=1.0)
        )  # fmt: skip
    listed = (await client.get(f"/v1/jobs/{job}/samples", params={"step": 4, "min_reward": 0.5})).json()["data"]
    assert [(row["handle"], row["length"], row["oldest_version"], row["newest_version"]) for row in listed] == [
        (7, 3, 3, 4)
    ]
    assert "token_ids" not in listed[0]
    one = (await client.get(f"/v1/jobs/{job}/samples/{response_id(job, 7)}")).json()
    assert (one["token_ids"], one["logprobs"], one["step"]) == ([5, 6, 7], [-1.0] * 3, 4)
    assert one["version_runs"] == [{"n": 2, "version": 3}, {"n": 1, "version": 4}]
    assert one["pieces"][1] == {"offset": 2, "n": 1, "attempt": str(attempt), "worker": "wkr_b"}
    assert one["components"] == [{"name": "exact_match", "value": None, "weight": 1.0}]
    live.samples[job, 8] = {**one, "id": response_id(job, 8), "handle": 8, "state": "streaming", "finish": None,
                            "reward": None}  # fmt: skip
    assert (await client.get(f"/v1/jobs/{job}/samples/{response_id(job, 8)}")).json()["state"] == "streaming"
    running = (await client.get(f"/v1/jobs/{job}/samples", params={"state": "live"})).json()["data"]
    assert [row["handle"] for row in running] == [8]
    assert (await client.get(f"/v1/jobs/{job}/samples/{response_id(job, 9)}")).status_code == 404
