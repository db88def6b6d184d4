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
from rlharvest.testing.faults import FAULTS, wait_sprung, with_faults
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


@contextmanager
def without_the_other(system: System) -> Iterator[None]:
    """Everything waits for the victim meanwhile, so a job cannot end before it has died as often as it shall."""
    other = system.workers[1]
    other.stop()
    try:
        yield
    finally:
        other.start()


@pytest.mark.parametrize(
    "traps", [points.JOINING.values(), points.WARMING.values()], ids=["while it joins", "while it gets ready"]
)
def test_the_only_worker_dies_before_it_generates(system: System, traps: Iterable[str]) -> None:
    """At one point after another, in one job: the job waits, and ends as if nothing had been."""
    spec = small(system)
    with without_the_other(system):
        job = system.submit(spec)
        for trap in traps:
            wait_sprung(system, armed(system, trap), trap)
        system.workers[0].start()
    found = system.finish(job, spec)
    assert found["counters"].get("dropped", 0) == 0


def test_worker_dies_at_every_point_while_it_generates(system: System) -> None:
    """In job after job until it has died at each: its responses go on elsewhere, from what became durable."""
    spec = small(system, algorithm={"prompts_per_step": 8}, limits={"max_steps": 3})
    jobs = [system.submit(spec)]
    traps = list(points.GENERATING.values())
    victim = armed(system, traps[0])

    def dead() -> bool:
        if system.job(jobs[-1])["status"] == "succeeded":
            jobs.append(system.submit(spec))
        return not victim.running

    for trap, following in zip(traps, [*traps[1:], ""], strict=True):
        system.until(dead, timeout_s=180, what=f"the trap to spring: {trap}")
        wait_sprung(system, victim, trap)
        victim.start(**{FAULTS: following})
    moved = sum(system.finish(job, spec)["counters"].get("reassigned", 0) for job in jobs)
    assert moved >= len(traps) // 2, "hardly a death mattered"


def test_worker_dies_while_it_follows_a_version(system: System) -> None:
    """In three steps one after another: the next step's responses are generated all the same."""
    spec = small(system, limits={"max_steps": 4})
    traps = list(points.FOLLOWING.values())
    victim = armed(system, traps[0])
    system.wait_joined(victim)
    with without_the_other(system):
        job = system.submit(spec)
        for trap, following in zip(traps, [*traps[1:], ""], strict=True):
            wait_sprung(system, victim, trap)
            victim.start(**{FAULTS: following})
    system.finish(job, spec)


def test_worker_dies_while_it_drains(system: System) -> None:
    """SIGKILL on top of a SIGTERM, three times: what was handed over stays, the rest is generated again."""
    spec = small(system, rollout=halting(6), algorithm={"prompts_per_step": 4})
    with without_the_other(system):
        job = system.submit(spec)
        for trap in points.DRAINING.values():
            victim = armed(system, trap)
            system.wait_streaming(job, tokens=HALF, worker=victim)
            victim.signal(signal.SIGTERM)
            wait_sprung(system, victim, trap)
        system.workers[0].start()
    system.finish(job, spec)


@pytest.mark.parametrize("trap", points.CONTINUING.values(), ids=points.CONTINUING)
def test_worker_dies_while_it_takes_over_from_a_dead_one(system: System, trap: str) -> None:
    """Two deaths in a row: the second worker dies with the first one's tokens in its hands."""
    spec = small(system, rollout={**halting(4), "progress_deadline_s": 3})
    victim, other = armed(system, trap), system.workers[1]
    system.wait_joined(victim)
    job = system.submit(spec)
    system.wait_streaming(job, tokens=HALF, worker=other)
    other.kill()
    try:
        wait_sprung(system, victim, trap)
    finally:
        victim.start()
        other.start()
    found = system.finish(job, spec)
    assert found["counters"]["reassigned"] >= 2
