"""A worker dies at a named point of its life, from registering to draining: no token is lost or doubled, whatever the point.

The traps are set by rlharvest.testing.faults, so each death is at its point and not near it.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from rlharvest.testing import points
from rlharvest.testing.audit import check_job
from rlharvest.testing.faults import FAULTS, with_faults
from rlharvest.testing.system import Service, System

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    """One system for all points. Few slots: there is work for both workers. Short prefixes go by reference."""
    settings = {"RLHARVEST_HEARTBEAT_S": "0.2", "RLHARVEST_HEARTBEAT_DEADLINE_S": "1.5"}
    system = System(tmp_path_factory.mktemp("system"), workers=2, slots=2, settings=settings)
    for service in (system.coordinator, *system.workers):
        with_faults(service)
    system.coordinator.environment[FAULTS] = points.INLINE_LITTLE
    with system:
        yield system


HALF = 15
"""Tokens at which a response of `halting` waits for another owner."""


def halting(handles: int) -> dict[str, Any]:
    """Return stub options with which the first responses stop in the middle until their owner has lost them."""
    return {
        "stub": {
            "step_s": 0.02,
            "length": 40,
            "hang_handles": list(range(handles)),
            "hang_attempts": 1,
            "hang_after": HALF,
        }
    }


def joined(system: System, worker: Service) -> bool:
    assert worker.process is not None
    return any(
        seen["pid"] == worker.process.pid and seen["state"] not in ("dead", "gone") for seen in system.client.workers()
    )


def streams(system: System, job: str, worker: Service) -> bool:
    """Whether a worker holds responses that have tokens."""
    assert worker.process is not None
    held = any(seen["pid"] == worker.process.pid and seen["held"] >= 2 for seen in system.client.workers())
    lengths = [sample["length"] for sample in system.client.live_samples(job) if sample["state"] == "streaming"]
    return held and sum(length >= HALF for length in lengths) >= 2


def small(system: System, **changes: Any) -> dict[str, Any]:
    return system.spec(
        **{
            "rollout": {"stub": {"step_s": 0.02, "length": 40}},
            "sampling": {"num_generations": 2, "max_completion_length": 60},
            "algorithm": {"prompts_per_step": 3},
            "limits": {"max_steps": 1},
            **changes,
        }
    )


def armed(system: System, trap: str) -> Service:
    """Start the first worker again with a trap."""
    victim = system.workers[0]
    victim.kill()
    return victim.start(**{FAULTS: trap})


def wait_joined(system: System, worker: Service) -> None:
    system.until(lambda: joined(system, worker), timeout_s=120, what=f"{worker.name} to join")


def dies(system: System, victim: Service, trap: str) -> None:
    """Wait for the victim's death, which must be the trap's."""
    system.until(lambda: not victim.running, timeout_s=120, what=f"the trap to spring: {trap}")
    assert victim.process is not None
    assert victim.process.returncode == -signal.SIGKILL, trap


@contextmanager
def without_the_other(system: System) -> Iterator[None]:
    """Everything waits for the victim meanwhile, so a job cannot end before it has died as often as it shall."""
    other = system.workers[1]
    other.stop()
    try:
        yield
    finally:
        other.start()


def finish(system: System, job: str, spec: dict[str, Any]) -> dict[str, Any]:
    found = system.wait(job, "succeeded", timeout_s=240)
    check_job(spec, found, system.samples(job))
    return found


@pytest.mark.parametrize(
    "traps", [points.JOINING.values(), points.WARMING.values()], ids=["while it joins", "while it gets ready"]
)
def test_the_only_worker_dies_before_it_generates(system: System, traps: Iterable[str]) -> None:
    """At one point after another, in one job: the job waits, and ends as if nothing had been."""
    spec = small(system)
    with without_the_other(system):
        job = system.submit(spec)
        for trap in traps:
            dies(system, armed(system, trap), trap)
        system.workers[0].start()
    found = finish(system, job, spec)
    assert found["counters"].get("dropped", 0) == 0


@pytest.mark.parametrize("trap", points.GENERATING.values(), ids=points.GENERATING)
def test_worker_dies_while_it_generates(system: System, trap: str) -> None:
    """Its responses go on elsewhere, from what became durable."""
    spec = small(system)
    victim = armed(system, trap)
    wait_joined(system, victim)
    job = system.submit(spec)
    dies(system, victim, trap)
    victim.start()
    finish(system, job, spec)


def test_worker_dies_while_it_follows_a_version(system: System) -> None:
    """In three steps one after another: the next step's responses are generated all the same."""
    spec = small(system, limits={"max_steps": 4})
    traps = list(points.FOLLOWING.values())
    victim = armed(system, traps[0])
    wait_joined(system, victim)
    with without_the_other(system):
        job = system.submit(spec)
        for trap, following in zip(traps, [*traps[1:], ""], strict=True):
            dies(system, victim, trap)
            victim.start(**{FAULTS: following})
    finish(system, job, spec)


def test_worker_dies_while_it_drains(system: System) -> None:
    """SIGKILL on top of a SIGTERM, three times: what was handed over stays, the rest is generated again."""
    spec = small(system, rollout=halting(6), algorithm={"prompts_per_step": 4})
    with without_the_other(system):
        job = system.submit(spec)
        for trap in points.DRAINING.values():
            victim = armed(system, trap)
            system.until(lambda: streams(system, job, system.workers[0]), timeout_s=120, what="the worker to generate")
            victim.signal(signal.SIGTERM)
            dies(system, victim, trap)
        system.workers[0].start()
    finish(system, job, spec)


@pytest.mark.parametrize("trap", points.CONTINUING.values(), ids=points.CONTINUING)
def test_worker_dies_while_it_takes_over_from_a_dead_one(system: System, trap: str) -> None:
    """Two deaths in a row: the second worker dies with the first one's tokens in its hands."""
    spec = small(system, rollout={**halting(4), "progress_deadline_s": 3})
    victim, other = armed(system, trap), system.workers[1]
    wait_joined(system, victim)
    job = system.submit(spec)
    system.until(lambda: streams(system, job, other), timeout_s=120, what="the other worker to generate")
    other.kill()
    try:
        dies(system, victim, trap)
    finally:
        victim.start()
        other.start()
    found = finish(system, job, spec)
    assert found["counters"]["reassigned"] >= 2
