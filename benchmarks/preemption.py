"""What the loss of a worker costs, in tokens and in seconds: `python -m benchmarks.preemption`.

Real processes, real NATS and Valkey, the stub engine at 100 tokens/s a response. Two workers share a job; each can hold
all of it, so an orphan never waits for a slot. Workers are killed one after another in the middle of generation, at a
random phase of their flush, and started again; the job runs to its end, and every response is compared with the
uninterrupted run.

How each figure is found:

- Tokens regenerated per SIGKILL: what the dead worker had generated and not published. The stub engine makes a token
  every `step_s` from the moment it takes a response, and the least lag of its published tokens behind that line places
  the line (wiretap.Tape.generated). So generated-at-kill minus published is known to about one token a response. The
  bar is one flush: flush_s * tokens/s of all responses that the worker held.
- Published tokens generated again: counted exactly, as tokens that two attempts of a response both published.
- Tokens lost: tokens of the uninterrupted run that are not at their place; rlharvest.testing.audit then checks versions,
  owners and counters as well.
- Seconds to the first new token: from just before the signal to the moment at which the first span of a later attempt
  passes on the bus, for the slowest orphan of that worker. Detection ends where the coordinator logs the worker's end.
- False deaths: all processors are kept busy by twice as many processes; every worker that is declared dead is one.
- Join to first token: a new worker process beside a weight cache that holds the version, while responses wait; from its
  start to its first span. Importing Python modules is the most of it and is printed apart.
"""

from __future__ import annotations

import argparse
import random
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.testing.system import Service, System

from benchmarks import command
from benchmarks.audit import Auditor
from benchmarks.journal import lines, wait_line
from benchmarks.processor import busy, import_seconds
from benchmarks.report import MEASUREMENTS, Report
from benchmarks.wiretap import Owner, Tape, Wiretap

STEP_S = 0.01
LENGTH = 300
FLUSH_S = 0.1
DEADLINE_S = 3.0
SIGTERM_BAR_S = 0.5
BUSY_S = 15.0
SEED = 20


@dataclass(frozen=True, slots=True)
class Loss:
    """What one signal to one worker cost."""

    responses: int
    detection_s: float
    redispatch_s: float
    total_s: float
    regenerated: int
    """Tokens that were generated and not published."""

    @property
    def flush_tokens(self) -> float:
        """Tokens of one flush of this worker, by its rate."""
        return self.responses * FLUSH_S / STEP_S


class Bench:
    """One system under test."""

    def __init__(self, system: System, tap: Wiretap) -> None:
        self.system = system
        self.tap = tap
        self.random = random.Random(SEED)
        self.audit = Auditor(system, tap)

    def spec(self, **changes: Any) -> dict[str, Any]:
        """Return a job of 16 responses a step that take 3 s each."""
        return self.system.spec(
            **{
                "rollout": {"stub": {"step_s": STEP_S, "length": LENGTH}},
                "sampling": {"max_completion_length": LENGTH + 20},
                "checkpoint": {"every_steps": 5},
                **changes,
            }
        )

    def worker_id(self, service: Service) -> str:
        """Return the name under which a worker process joined."""
        assert service.process is not None
        found: list[str] = []

        def joined() -> bool:
            assert service.process is not None
            found[:] = [seen["id"] for seen in self.system.client.workers() if seen["pid"] == service.process.pid]
            return bool(found)

        self.system.until(joined, timeout_s=30, what=f"{service.name} to join")
        return found[0]

    # --- SIGKILL and SIGTERM ------------------------------------------------------------------------------------------

    def losses(self, number: signal.Signals, log_event: str) -> tuple[list[Loss], int]:
        """Signal workers in one job; return what each cost, and how many tokens were published twice in the job."""
        spec = self.spec(limits={"max_steps": MEASUREMENTS + 3})
        job = self.system.submit(spec)
        found = []
        for index in range(MEASUREMENTS):
            victim = self.system.workers[index % 2]
            ids = [self.worker_id(worker) for worker in self.system.workers]
            self.audit.wait(job, _in_the_middle(ids), timeout_s=90, what="work on both workers")
            found.append(self.loss(job, victim, ids[index % 2], number, log_event))
            say(f"{number.name} {index + 1} of {MEASUREMENTS}: {found[-1]}")
            victim.stop()
            victim.start()
        self.audit.end(job, spec)
        return found, self.tap.read(job, Tape.twice)

    def loss(self, job: str, victim: Service, worker: str, number: signal.Signals, log_event: str) -> Loss:
        """Signal one worker; return what it cost once all its responses go on elsewhere."""
        time.sleep(self.random.uniform(0, FLUSH_S))
        wall, at = time.time(), time.monotonic()
        victim.signal(number)
        ended, _ = wait_line(self.system.coordinator, log_event, after=wall, timeout_s=DEADLINE_S + 10, worker=worker)
        held = self.tap.read(job, lambda tape: _owned_at(tape, worker, at))
        assert held, f"worker {worker} held nothing"
        self.audit.wait(
            job,
            lambda tape: all(tape.continued(handle, owner.attempt) for handle, owner in held.items()),
            timeout_s=20,
            what="orphans to go on elsewhere",
        )
        return self.tap.read(job, lambda tape: _loss(tape, held, at, detection_s=ended - wall))

    # --- full load ----------------------------------------------------------------------------------------------------

    def false_deaths(self) -> int:
        """Return how many workers are declared dead while every processor is busy and none of them died."""
        spec = self.spec(limits={"max_steps": 8})
        wall = time.time()
        job = self.system.submit(spec)
        self.audit.wait(job, lambda tape: tape.epoch > 0, timeout_s=60, what="the first assignments")
        with busy():
            time.sleep(BUSY_S)
            status = self.system.job(job)["status"]
        assert status == "running", f"the job was {status} before the load was over"
        self.audit.end(job, spec)
        return sum(1 for _ in lines(self.system.coordinator, "worker.dead", after=wall))

    # --- joining ------------------------------------------------------------------------------------------------------

    def joins(self) -> tuple[list[float], list[float]]:
        """Return (start to registered, start to first token) of new worker processes while responses wait, in seconds."""
        self.system.workers[1].stop()
        spec = self.spec(
            rollout={"stub": {"step_s": STEP_S, "length": 100}},
            algorithm={"prompts_per_step": 48},
            limits={"max_steps": 4},
        )
        job = self.system.submit(spec)
        registered, first = [], []
        cache = str(self.system.directory / "cache" / "0")
        for index in range(MEASUREMENTS):
            self.system.until(
                lambda: ((self.system.job(job)["responses"] or {}).get("pending", 0)) >= 100,
                timeout_s=90,
                what="responses that wait",
            )
            service = self.system.worker(10 + index)
            wall, at = time.time(), time.monotonic()
            service.start(RLHARVEST_CACHE_DIR=cache)
            try:
                joined, line = wait_line(service, "worker.joined", after=wall, timeout_s=30)
                first.append(self.first_token(job, line["worker"]) - at)
            finally:
                service.stop()
            registered.append(joined - wall)
            say(f"join {index + 1} of {MEASUREMENTS}: registered {registered[-1]:.2f} s, first token {first[-1]:.2f} s")
        self.audit.end(job, spec)
        return registered, first

    def first_token(self, job: str, worker: str) -> float:
        """Wait for a worker's first token on the bus; return when it passed."""
        self.audit.wait(
            job, lambda tape: tape.first_tokens(worker) is not None, timeout_s=30, what=f"a token of {worker}"
        )
        at = self.tap.read(job, lambda tape: tape.first_tokens(worker))
        assert at is not None
        return at


def _in_the_middle(workers: list[str]) -> Callable[[Tape], bool]:
    """Return the question whether each of the workers is in the middle of several responses."""

    def answer(tape: Tape) -> bool:
        lengths = {worker: [tape.tracks[handle].length for handle in tape.held(worker)] for worker in workers}
        return all(len(held) >= 4 and all(20 <= n <= LENGTH - 50 for n in held) for held in lengths.values())

    return answer


def _owned_at(tape: Tape, worker: str, at: float) -> dict[int, Owner]:
    """Return the responses that a worker held at a time and has not finished since."""
    held = tape.held(worker)
    for orphaned_at, handle in tape.orphaned:
        if orphaned_at >= at:
            track = tape.tracks[handle]
            owner = next((owner for owner in reversed(track.owners) if owner.worker == worker), None)
            if owner is not None:
                held[handle] = owner
    return held


def _loss(tape: Tape, held: dict[int, Owner], at: float, *, detection_s: float) -> Loss:
    resumed = [piece for handle, owner in held.items() if (piece := tape.continued(handle, owner.attempt))]
    total_s = max(piece.at for piece in resumed) - at
    published = {handle: tape.published(handle, owner.attempt) for handle, owner in held.items()}
    return Loss(
        responses=len(held),
        detection_s=detection_s,
        redispatch_s=total_s - detection_s,
        total_s=total_s,
        regenerated=sum(
            tape.generated(handle, owner, at, STEP_S) - published[handle] for handle, owner in held.items()
        ),
    )


def say(text: str) -> None:
    """Show progress."""
    print(text, flush=True)


def measure(report: Report, directory: Path) -> None:
    """Run everything; each part is in the report as soon as it is done."""
    report.median("worker_import", "s", import_seconds("rlharvest_rollout.cli"))
    settings = {
        "RLHARVEST_LOG_FORMAT": "json",
        "RLHARVEST_FLUSH_S": str(FLUSH_S),
        "RLHARVEST_HEARTBEAT_DEADLINE_S": str(DEADLINE_S),
    }
    with System(directory, workers=2, slots=16, settings=settings) as system, Wiretap(system.nats) as tap:
        bench = Bench(system, tap)
        kills, twice = bench.losses(signal.SIGKILL, "worker.dead")
        flushes = [loss.regenerated / loss.flush_tokens for loss in kills]
        report.median("sigkill_regenerated", "tokens", [loss.regenerated for loss in kills])
        report.median("sigkill_regenerated_flushes", "flushes", flushes)
        _times(report, "sigkill", kills)
        terms, twice_more = bench.losses(signal.SIGTERM, "worker.left")
        report.median("sigterm_regenerated", "tokens", [loss.regenerated for loss in terms])
        _times(report, "sigterm", terms)
        report.count("published_tokens_generated_again", "tokens", twice + twice_more)
        report.count("false_deaths_under_full_load", "workers", bench.false_deaths())
        registered, first = bench.joins()
        report.median("join_to_registered", "s", registered)
        report.median("join_to_first_token", "s", first)
        # Last, so that a run which was broken off has none.
        report.count("tokens_lost", "tokens", bench.audit.lost)
        report.count("responses_compared", "responses", bench.audit.compared)


def _times(report: Report, name: str, losses: list[Loss]) -> None:
    report.median(f"{name}_detection", "s", [loss.detection_s for loss in losses])
    report.median(f"{name}_redispatch", "s", [loss.redispatch_s for loss in losses])
    report.median(f"{name}_to_new_token", "s", [loss.total_s for loss in losses])


def bars(report: Report) -> None:
    """Say what the figures must be."""
    report.bar("sigkill_regenerated_flushes", 1.0, "one flush")
    report.bar("sigkill_to_new_token", DEADLINE_S + 1.0, "heartbeat deadline + 1 s")
    report.bar("sigterm_to_new_token", SIGTERM_BAR_S, "0.5 s")
    report.none("published_tokens_generated_again", "tokens_lost", "false_deaths_under_full_load")


def main() -> int:
    """Measure, print, and return the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    return command.run("preemption", measure, bars)


if __name__ == "__main__":
    sys.exit(main())
