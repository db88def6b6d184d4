"""Nobody dies, but somebody does not answer: a black hole in the network, a swallowed request, a coordinator that is away.

And responses that never get to stay where they are.
"""

from __future__ import annotations

import asyncio
import re
import sqlite3
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from rlharvest import bus
from rlharvest.spans import unpack
from rlharvest.testing.faults import FAULTS, HOST, with_faults
from rlharvest.testing.proxy import Proxy
from rlharvest.testing.servers import free_port
from rlharvest.testing.system import Service, System
from rlharvest.v1 import fleet_pb2

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BUFFER = 150
"""Tokens that a worker keeps for a coordinator that is away."""


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[System, Proxy]]:
    """One system for all silences; the first worker reaches NATS through a proxy."""
    settings = {
        "RLHARVEST_HEARTBEAT_S": "0.2",
        "RLHARVEST_HEARTBEAT_DEADLINE_S": "1.5",
        "RLHARVEST_FLUSH_S": "0.05",
        "RLHARVEST_BUFFER_TOKENS": str(BUFFER),
    }
    system = System(tmp_path_factory.mktemp("system"), workers=2, settings=settings)
    for worker in system.workers:
        with_faults(worker).environment["RLHARVEST_HEALTH_PORT"] = str(free_port())
    name = system.directory / "nats.example"
    name.touch()
    behind = system.workers[0].environment
    with Proxy(behind["RLHARVEST_NATS_URL"]) as proxy:
        behind |= {"RLHARVEST_NATS_URL": proxy.url.replace("127.0.0.1", name.name), HOST: str(name)}
        with system:
            yield system, proxy


@pytest.fixture
def system(parts: tuple[System, Proxy]) -> System:
    return parts[0]


@pytest.fixture
def proxy(parts: tuple[System, Proxy]) -> Proxy:
    return parts[1]


def spec_of(system: System, **changes: Any) -> dict[str, Any]:
    return system.spec(
        **{
            "rollout": {"stub": {"step_s": 0.03, "length": 60}},
            "sampling": {"num_generations": 4, "max_completion_length": 100},
            "algorithm": {"prompts_per_step": 3},
            "limits": {"max_steps": 1},
            **changes,
        }
    )


def orphaned(system: System, job: str, reason: str) -> bool:
    return any(
        event["type"] == "response.orphaned" and event["data"]["reason"] == reason
        for event in system.client.events(job)
    )


def gauge(worker: Service, name: str) -> float:
    """Value of a worker's metric."""
    url = f"http://127.0.0.1:{worker.environment['RLHARVEST_HEALTH_PORT']}/metrics"
    with urllib.request.urlopen(url, timeout=5) as reply:
        found = re.search(rf"^{name} (\S+)$", reply.read().decode(), re.MULTILINE)
    assert found, f"{worker.name} has no metric {name}"
    return float(found.group(1))


def test_worker_in_a_black_hole_is_replaced_and_its_late_tokens_are_fenced(system: System, proxy: Proxy) -> None:
    """Nothing is closed, nothing arrives. When the hole ends, tokens of an old attempt arrive, and change nothing."""
    spec = spec_of(system, rollout={"stub": {"step_s": 0.08, "length": 60}})
    job = system.submit(spec)
    system.wait_streaming(job, responses=4, worker=system.workers[0])
    proxy.swallow()
    try:
        system.until(lambda: orphaned(system, job, "dead"), timeout_s=240, what="its responses to be taken away")
    finally:
        proxy.forward()
    system.until(
        lambda: system.job(job)["counters"].get("fenced_tokens", 0) > 0, timeout_s=240, what="the late tokens to arrive"
    )
    found = system.finish(job, spec)
    assert found["counters"]["reassigned"] > 0
    system.until(
        lambda: system.seat(system.workers[0])["state"] == "ready", timeout_s=240, what="the worker to be back"
    )


def test_worker_whose_network_ends_with_its_names_is_replaced_and_comes_back(system: System, proxy: Proxy) -> None:
    """Its connection is closed, and the server's name leads nowhere any more: it tries until it does."""
    name = system.directory / "nats.example"
    spec = spec_of(system, rollout={"stub": {"step_s": 0.08, "length": 60}})
    job = system.submit(spec)
    system.wait_streaming(job, responses=4, worker=system.workers[0])
    name.unlink()
    proxy.drop()
    try:
        system.until(lambda: orphaned(system, job, "dead"), timeout_s=240, what="its responses to be taken away")
    finally:
        name.touch()
    system.finish(job, spec)
    system.until(
        lambda: system.seat(system.workers[0])["state"] == "ready", timeout_s=240, what="the worker to be back"
    )
    assert system.workers[0].running


def test_worker_that_swallows_a_request_while_it_beats(system: System) -> None:
    """An assignment that its worker never saw shows in the heartbeats, and goes elsewhere."""
    swallower = system.workers[1]
    swallower.stop()
    swallower.start(**{FAULTS: "skip before rlharvest_rollout.worker:Worker._on_assign"})
    system.wait_joined(swallower)
    spec = spec_of(system)
    job = system.submit(spec)
    system.until(lambda: orphaned(system, job, "missing"), timeout_s=240, what="the coordinator to miss them")
    system.finish(job, spec)
    assert "trap: skip" in swallower.log.read_text()


def test_response_that_its_worker_holds_and_never_goes_on_with(system: System) -> None:
    """The heart beats and the response is shown, but no token comes: it goes elsewhere after its progress deadline."""
    stub = {"step_s": 0.02, "length": 30, "hang_handles": [0, 1], "hang_attempts": 1}
    spec = spec_of(system, rollout={"stub": stub, "progress_deadline_s": 1.5})
    job = system.submit(spec)
    system.until(lambda: orphaned(system, job, "stalled"), timeout_s=240, what="the coordinator to lose patience")
    system.finish(job, spec)


def test_workers_of_a_coordinator_that_is_away_fill_their_buffers_pause_and_go_on(system: System) -> None:
    """However long it takes: what they generated is kept, nothing is generated past the buffer, nothing is taken away."""
    spec = spec_of(
        system,
        rollout={"stub": {"step_s": 0.02, "length": 140}},
        sampling={"max_completion_length": 150},
        algorithm={"prompts_per_step": 4},
    )
    job = system.submit(spec)
    for worker in system.workers:
        system.wait_streaming(job, responses=4, worker=worker)
    system.coordinator.kill()
    system.until(
        lambda: all(gauge(worker, "rlharvest_rollout_paused") == 1 for worker in system.workers),
        timeout_s=240,
        what="the workers to pause",
    )
    time.sleep(0.5)  # tokens that were on their way from the engine
    kept = [gauge(worker, "rlharvest_rollout_buffered_tokens") for worker in system.workers]
    time.sleep(2.0)  # longer than the heartbeat deadline: nobody is there to hold it against them
    assert [gauge(worker, "rlharvest_rollout_buffered_tokens") for worker in system.workers] == kept
    assert all(tokens >= BUFFER for tokens in kept)
    system.coordinator.start()
    system.ready()
    found = system.finish(job, spec)
    assert found["counters"].get("reassigned", 0) == 0, "generated tokens were thrown away"


def epoch_on_record(system: System) -> int:
    with sqlite3.connect(system.directory / "data" / "coordinator.sqlite3", timeout=10) as connection:
        (epoch,) = connection.execute("select epoch from leader").fetchone()
    connection.close()
    return int(epoch)


async def preempt(system: System, job: str, times: int, *, responses: int) -> None:
    """Let a worker join anew, which takes everything from it, whenever all its responses have got a token since."""
    client = await bus.connect(system.nats.url, "preemptor", credential=system.nats.credential)
    spans = await client.subscribe(bus.subject("spans", job, "*"))
    epoch = epoch_on_record(system)
    gone = 0
    got: set[int] = set()
    try:
        async for message in spans.messages:
            flush = unpack(message.data)
            if flush.incarnation <= gone:
                continue
            got |= {span.handle for span in flush.spans if len(span.ids)}
            if len(got) < responses:
                continue
            gone, got, times = flush.incarnation, set(), times - 1
            order = fleet_pb2.Rejoin(incarnation=gone, reason="preempted", epoch=epoch)
            await client.publish(bus.subject("rejoin", who=flush.worker), order.SerializeToString())
            if not times:
                return
    finally:
        await client.close()


def test_a_response_that_is_preempted_a_hundred_times_is_the_uninterrupted_one(system: System) -> None:
    """Each owner adds a token or two before it loses the response; what became durable is never generated again."""
    system.workers[0].stop()
    stub = {"step_s": 0.01, "length": 250, "hang_handles": [0, 1], "hang_attempts": 100, "hang_after": 2}
    spec = spec_of(
        system,
        rollout={"stub": stub, "progress_deadline_s": 600},
        sampling={"num_generations": 2, "max_completion_length": 300},
        algorithm={"prompts_per_step": 1},
    )
    job = system.submit(spec)
    asyncio.run(preempt(system, job, 100, responses=2))
    found = system.finish(job, spec)
    system.workers[0].start()
    assert found["counters"]["reassigned"] >= 200
    for sample in system.samples(job).values():
        assert len(sample["pieces"]) > 100, "one response was spared"
