"""A server that is a dictionary: the REST answers that the command line needs, through httpx's own mock transport."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from rlharvest.client import Client

JOB = "rljob_01k00000000000000000000001"
RESPONSE = "resp_01k00000000000000000000001_5"


def job(**changes: Any) -> dict[str, Any]:
    """A job as REST shows it."""
    progress = {
        "step": 3,
        "max_steps": 10,
        "weight_version": 3,
        "trained_tokens": 1234,
        "generated_tokens": 2000,
        "salvaged_tokens": 55,
        "regenerated_tokens": 7,
    }
    return {
        "id": JOB,
        "name": "sums",
        "model": "/models/tiny",
        "status": "running",
        "status_detail": {"reason": "WaitingForWorkers", "message": "0 ready workers.", "since": 0.0},
        "queue_position": None,
        "created_at": 1000.0,
        "started_at": 1010.0,
        "finished_at": None,
        "trainer": "trainer-1",
        "progress": {**progress, **changes.pop("progress", {})},
        "workers": {"ready": 1, "lost_total": 2},
        "counters": {"submitted": 40},
        "error": None,
        "latest_checkpoint": None,
        "spec": {"model": "/models/tiny"},
        **changes,
    }


def worker(**changes: Any) -> dict[str, Any]:
    """A worker as REST shows it."""
    return {
        "id": "wkr_01k00000000000000000000009",
        "state": "ready",
        "job": JOB,
        "version": 3,
        "slots": 32,
        "held": 4,
        "tokens_per_s": 123.456,
        "generated_tokens": 2000,
        "note": "",
        "hostname": "spot-1",
        "pid": 77,
        "worker_class": "preemptible",
        "joined_at": 1000.0,
        "left_at": None,
        **changes,
    }


SAMPLE = {
    "id": RESPONSE,
    "job": JOB,
    "handle": 5,
    "group": 1,
    "state": "trained",
    "step": 2,
    "staleness": 0,
    "finish": "eos",
    "length": 9,
    "oldest_version": 1,
    "newest_version": 2,
    "prompt": "1+1=",
    "text": "[bold]2",
    "reward": 0.5,
    "components": [
        {"name": "exact", "value": 1.0, "weight": 0.5},
        {"name": "length", "value": None, "weight": 1.0},
    ],
    "created_at": 1.0,
    "token_ids": [1],
    "logprobs": [-0.5],
    "version_runs": [{"n": 4, "version": 1}, {"n": 5, "version": 2}],
    "pieces": [
        {"offset": 0, "n": 4, "attempt": str(1 << 32 | 1), "worker": "wkr_a"},
        {"offset": 4, "n": 5, "attempt": str(2 << 32 | 3), "worker": "wkr_b"},
    ],
}


class Server:
    """What it answers, and what it was asked."""

    def __init__(self) -> None:
        self.jobs: list[dict[str, Any]] = [job()]
        self.workers: list[dict[str, Any]] = [worker()]
        self.checkpoints: list[dict[str, Any]] = []
        self.requests: list[httpx.Request] = []
        self.on_job: Callable[[], None] = lambda: None
        self.down = False

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        if self.down:
            raise httpx.ConnectError("refused")
        path = request.url.path
        if path == "/v1/jobs" and request.method == "POST":
            body = json.loads(request.content)
            if "model" not in body:
                return _error(400, "invalid_field", "model: field required. docs/job.md lists every field.")
            return httpx.Response(201, json=self.jobs[0])
        if path == "/v1/jobs":
            return _list(self.jobs)
        if path == "/v1/audit":
            record = {"id": "7", "at": 0.0, "who": "token-0a1b2c3d4e5f", "address": "10.1.2.3", "action": "cancel_job"}
            data = [{**record, "subject": JOB, "result": "409", "done": False}]
            return httpx.Response(200, json={"data": data, "has_more": False})
        if path == "/v1/workers":
            return httpx.Response(200, json={"data": self.workers})
        if path.endswith("/drain"):
            return httpx.Response(200, json=self.workers[0])
        if path.endswith("/metrics"):
            series = {"reward": [0.1, 0.2, 0.4], "completions/mean_length": [9.0, 8.0, 7.5], "loss": [0.3, None, 0.1]}
            return httpx.Response(200, json={"steps": [1, 2, 3], "series": series})
        if path.endswith("/samples"):
            return _list([SAMPLE])
        if "/samples/" in path:
            return httpx.Response(200, json=SAMPLE)
        if path.endswith("/checkpoints"):
            return _list(self.checkpoints)
        if path.endswith("/events"):
            events = [
                {
                    "number": 1,
                    "created_at": 1.0,
                    "type": "worker.dead",
                    "level": "warn",
                    "message": "It is gone.",
                    "source": "crd",
                }
            ]
            return _list(events)
        if path.endswith(("/cancel", "/pause", "/resume")):
            return httpx.Response(200, json={**self.jobs[0], "status": "pausing"})
        for one in self.jobs:
            if path == f"/v1/jobs/{one['id']}":
                self.on_job()
                return httpx.Response(200, json=self.jobs[0])
        return _error(404, "not_found", f"there is nothing at {path}")


def _list(rows: list[dict[str, Any]]) -> httpx.Response:
    return httpx.Response(200, json={"data": rows, "has_more": False})


def _error(status: int, code: str, message: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code, "message": message, "param": None, "type": "x"}})


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    """The server that every command of the test speaks to."""
    found = Server()

    def connect(url: str | None, token: str | None) -> Client:
        return Client(url or "http://test", token, retry_s=0.0, transport=httpx.MockTransport(found))

    monkeypatch.setattr("rlharvest.cli.jobs.connect", connect)
    return found


@pytest.fixture
def make_job() -> Callable[..., dict[str, Any]]:
    """Makes a job as REST shows it; arguments go over its fields."""
    return job


@pytest.fixture
def make_worker() -> Callable[..., dict[str, Any]]:
    """Makes a worker as REST shows it; arguments go over its fields."""
    return worker
