"""A system with a job that is over and one that runs: what bad input is thrown at."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from rlharvest.testing.system import System

from benchmarks.fuzz import still
from benchmarks.fuzz.calls import Target

START_S = 240.0
"""The machine may be busy with other things."""


def finished(system: System) -> str:
    """Run a small job to its end; return it once nothing more is said of it."""
    spec = system.spec(limits={"max_steps": 1})
    job = system.submit(spec)
    system.finish(job, spec, timeout_s=START_S)
    system.until(
        lambda: any(event["type"] == "job.closed" for event in system.client.events(job)),
        timeout_s=60,
        what=f"job {job} to be closed",
    )
    return job


@contextmanager
def running(system: System, over: str, *, steps: int, step_s: float = 0.03) -> Iterator[Target]:
    """Start a job, give its true names out, and compare every token of it with the uninterrupted run at the end."""
    spec = still.slow_job(system, steps=steps, step_s=step_s)
    job = system.submit(spec)
    system.until(lambda: _generates(system, job), timeout_s=START_S, what=f"job {job} to generate")
    yield target(system, job, over)
    system.finish(job, spec, timeout_s=START_S + 60 * steps)


def target(system: System, job: str, over: str) -> Target:
    """Return the true names of a job and of the worker that is there."""
    worker = next(item for item in system.client.workers() if item["state"] not in ("dead", "gone"))
    with sqlite3.connect(f"file:{still.database(system)}?mode=ro", uri=True) as database:
        (fence,) = database.execute("SELECT fence FROM jobs WHERE id = ?", (job,)).fetchone()
    return Target(job=job, over=over, worker=worker["id"], incarnation=int(worker["incarnation"]), fence=fence)


def _generates(system: System, job: str) -> bool:
    found: dict[str, Any] = system.job(job)
    return bool(found["counters"].get("generated_tokens", 0) > 20)
