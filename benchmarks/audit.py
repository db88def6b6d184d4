"""A job under measurement: waits for what passes on the bus, and audits every response when the job has ended."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from rlharvest.errors import RlharvestError, Unavailable
from rlharvest.testing.audit import check_job, expected
from rlharvest.testing.system import System

from benchmarks.wiretap import Tape, Wiretap

ROWS = 32
"""Of the dataset that System.spec writes."""

_ENDED = ("failed", "cancelled", "succeeded")


class Auditor:
    """Watches the jobs of one system and counts what it compared."""

    def __init__(self, system: System, tap: Wiretap) -> None:
        self.system = system
        self.tap = tap
        self.compared = 0
        """Responses compared with the uninterrupted run."""
        self.lost = 0
        """Tokens of that run that are not at their place."""

    def wait(self, job: str, done: Callable[[Tape], bool], *, timeout_s: float, what: str) -> None:
        """Wait until `done` is true of a job's tape.

        Raises:
            Unavailable: it was not in time, or the job has ended before; says what was waited for, and how the job is.
        """
        end = time.monotonic() + timeout_s
        while not self.tap.wait(job, done, timeout_s=min(5.0, max(0.0, end - time.monotonic()))):
            state = self._state(job)
            if state.startswith(_ENDED) or time.monotonic() > end:
                raise Unavailable(f"waited for {what}; job {job} is {state}")

    def _state(self, job: str) -> str:
        try:
            found = self.system.job(job)
        except RlharvestError as error:
            return f"not known: {error}"  # the coordinator is being killed and restarted
        return f"{found['status']}: {found['error'] or found['status_detail']}"

    def end(self, job: str, spec: dict[str, Any], *, timeout_s: float = 180.0) -> dict[str, int]:
        """Wait for a job's end and compare every response with the uninterrupted run; return the job's counters.

        Raises:
            AssertionError: a response differs, or a counter does not add up; says which.
        """
        found = self.system.wait(job, "succeeded", timeout_s=timeout_s)
        samples = self.system.samples(job)
        self.lost += sum(misplaced(expected(spec, sample, ROWS)[0], sample["token_ids"]) for sample in samples.values())
        check_job(spec, found, samples, rows=ROWS)
        self.compared += len(samples)
        print(f"counters {found['counters']}", flush=True)
        return dict(found["counters"])


def misplaced(wanted: list[int], found: list[int]) -> int:
    """Return how many tokens of `wanted` are not at their place in `found`."""
    return len(wanted) - sum(1 for one, other in zip(wanted, found, strict=False) if one == other)
