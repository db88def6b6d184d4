"""The Python client against the served application."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from rlharvest.client import Client
from rlharvest.errors import Conflict, DataError, NotFound, Unavailable
from rlharvest.ids import response_id
from rlharvest.spans import ids_bytes
from rlharvest_coordinator.store import checkpoints, steps
from rlharvest_coordinator.tables import Sample

from .conftest import FakeLive, Served, spec
from .test_fleet import worker


@pytest.fixture
def locked(tmp_path: Path, live: FakeLive) -> Iterator[Served]:
    server = Served(tmp_path, live, token="t0ken")
    server.start()
    yield server
    server.stop()


def test_every_call_of_the_client(locked: Served, live: FakeLive) -> None:
    sessions = locked.sessions
    assert sessions is not None
    with Client(locked.url, "t0ken", retry_s=0.3) as client:
        assert client.ready() == {}
        job = client.create_job(spec(), idempotency_key="k")["id"]
        assert client.create_job(spec(), idempotency_key="k")["id"] == job
        with pytest.raises(Conflict, match=job):
            client.create_job(spec(seed=1), idempotency_key="k")
        with pytest.raises(DataError, match="seed = -1"):
            client.create_job(spec(seed=-1))
        assert [one["id"] for one in client.list_jobs(status="validating")] == [job]
        with pytest.raises(NotFound):
            client.get_job("rljob_none")

        locked.run(steps.record(sessions, job, 1, version=1, digest="d", fence=0, metrics={"reward": 0.5}, now=1.0))
        assert client.metrics(job, names=["reward"])["series"] == {"reward": [0.5]}
        locked.run(checkpoints.record(sessions, job, 1, version=1, path="c", digest="d", metrics={}, now=1.0))
        assert [row["path"] for row in client.checkpoints(job)] == ["c"]

        async def add_samples() -> None:
            async with sessions.begin() as session:
                for handle in range(3):
                    session.add(
                        Sample(job=job, handle=handle, response_id=response_id(job, handle), group=0, finish="eos",
                               ids=ids_bytes([handle]), logprobs=b"\0" * 4, runs=[[1, 0]], pieces=[[0, 1, "1", "w"]],
                               prompt_text="p", text="t", reward=handle / 2, components=[], at=1.0)
                    )  # fmt: skip

        locked.run(add_samples())
        assert [row["handle"] for row in client.samples(job, limit=2)] == [2, 1]
        assert [row["handle"] for row in client.samples(job, min_reward=0.9)] == [2]
        assert client.sample(job, response_id(job, 2))["token_ids"] == [2]

        live.here.append(worker("wkr_a"))
        assert client.drain("wkr_a", reason="why")["id"] == "wkr_a"
        assert live.drained == [("wkr_a", "why")]
        assert [row["id"] for row in client.workers()] == [client.worker("wkr_a")["id"]]
        with pytest.raises(Unavailable, match="weight service"):
            client.weights(job)

        with pytest.raises(Conflict, match="cancel it first"):
            client.delete(job)
        assert client.cancel(job)["status"] == "cancelled"
        with pytest.raises(Conflict):
            client.resume(job)
        assert client.delete(job)["deleted"]
        assert list(client.list_jobs()) == []
        live.leading = False
        assert list(client.ready()) == ["leading"]


def test_a_wrong_token_and_a_closed_port_say_so(locked: Served) -> None:
    with Client(locked.url, "wrong") as client, pytest.raises(DataError, match="Bearer"):
        client.get_job("j")
    locked.stop()
    with Client(locked.url, retry_s=0.2) as client:
        with pytest.raises(Unavailable, match="does not answer"):
            client.get_job("j")
        with pytest.raises(Unavailable, match="does not answer"):
            list(client.events("j", follow=True))
