"""Events over REST: pages both ways, and a stream that can be lost and taken up again."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import httpx
import pytest
from rlharvest.client import Client, sse_events
from rlharvest.jobs.state import Move
from rlharvest_coordinator.api.routes import events as route
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import events, jobs
from rlharvest_coordinator.store.events import NewEvent

from .conftest import FakeLive, Served, spec


def _event(job: str, n: int) -> NewEvent:
    message = f"line one\nline two {n} \N{LINE SEPARATOR}"
    return NewEvent(id=f"evt_{n}", job=job, level="info", type="t", message=message, at=n, source="s")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(route, "POLL_S", 0.02)
    monkeypatch.setattr(route, "SETTLE_S", 0.2)
    monkeypatch.setattr(route, "KEEP_ALIVE_S", 0.1)


async def test_pages_go_forward_by_number_and_back(client: httpx.AsyncClient, sessions: Sessions) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    await events.append(sessions, [_event(job, n) for n in range(5)])
    path = f"/v1/jobs/{job}/events"
    first = (await client.get(path, params={"limit": 4})).json()
    assert (first["data"][0]["type"], first["has_more"]) == ("job.created", True)
    rest = (await client.get(path, params={"after": first["data"][-1]["number"]})).json()
    assert [row["id"] for row in rest["data"]] == ["evt_3", "evt_4"]
    back = (await client.get(path, params={"order": "desc", "limit": 2})).json()
    assert [row["id"] for row in back["data"]] == ["evt_4", "evt_3"]
    further = (await client.get(path, params={"order": "desc", "after": back["data"][-1]["number"]})).json()
    assert further["data"][0]["id"] == "evt_2"


async def test_a_stream_goes_on_behind_the_last_id_and_ends_with_the_job(
    client: httpx.AsyncClient, sessions: Sessions
) -> None:
    job = (await client.post("/v1/jobs", json=spec())).json()["id"]
    await events.append(sessions, [_event(job, n) for n in range(3)])

    async def finish() -> None:
        await asyncio.sleep(0.3)
        await jobs.move(sessions, job, Move.CANCEL, now=1.0)
        await asyncio.sleep(0.05)
        await events.append(sessions, [_event(job, 3)])

    ending = asyncio.create_task(finish())
    headers = {"Accept": "text/event-stream", "Last-Event-ID": "2"}
    reply = await client.get(f"/v1/jobs/{job}/events", headers=headers)
    await ending
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert ": still here" in reply.text
    got = list(sse_events(reply.text.split("\n")))
    assert [event.name for event in got] == ["message", "message", "message", "end"]
    assert [event.id for event in got] == ["3", "4", "5", "5"]
    bad = await client.get(f"/v1/jobs/{job}/events", headers={"Accept": "text/event-stream", "Last-Event-ID": "x"})
    assert bad.json()["error"]["param"] == "Last-Event-ID"


def _follow(client: Client, job: str, seen: list[str]) -> Iterator[str]:
    for event in client.events(job, follow=True):
        seen.append(event["id"])
        yield event["id"]


def test_a_client_that_follows_misses_nothing_over_a_restart(served: Served, live: FakeLive) -> None:
    with Client(served.url) as client:
        job = client.create_job(spec())["id"]
        assert served.sessions is not None
        served.run(events.append(served.sessions, [_event(job, n) for n in range(3)]))
        seen: list[str] = []
        done = threading.Event()

        def follow() -> None:
            for _ in _follow(client, job, seen):
                pass
            done.set()

        thread = threading.Thread(target=follow)
        thread.start()
        served.stop()
        served.start()
        served.run(events.append(served.sessions, [_event(job, n) for n in range(3, 6)]))
        with Client(served.url) as other:
            other.cancel(job)
        assert done.wait(10)
        thread.join()
        assert seen[1:7] == [f"evt_{n}" for n in range(6)]
        assert len(seen) == len(set(seen)) == 8
        assert [event["id"] for event in client.events(job)] == seen
