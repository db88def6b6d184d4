"""How long nobody gives work after a coordinator's death: `python -m benchmarks.recovery`.

Real processes, real NATS and Valkey, the stub engine. More responses wait than the workers have slots, and responses are
short: whoever leads next has something to assign at once, to slots that became free meanwhile. In job after job the
leading coordinator is killed with SIGKILL, at first with a restart at once (cold), then with a second coordinator that
waits for the lease (hot). Each job runs to its end, and every response is compared with the uninterrupted run.

How each figure is found:

- Seconds to the first new assignment: from just before the signal, at a random moment, until the first assignment that
  was made in a higher epoch passes on the bus; one that is only sent again does not count. The bar of a cold restart is
  the time of importing the coordinator's modules, measured before each restart, and 2 s, one of which is the dead
  leader's lease.
- Phases: what the next leader logs, each from the signal on.
- Tokens thrown away: those that the ledger fenced off, and those that two attempts of a response both published.
- Tokens lost: tokens of the uninterrupted run that are not at their place; rlharvest.testing.audit then checks versions,
  owners and counters as well.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlharvest.testing.system import System

from benchmarks import command
from benchmarks.audit import Auditor
from benchmarks.journal import wait_line
from benchmarks.processor import import_seconds
from benchmarks.report import MEASUREMENTS, Report
from benchmarks.wiretap import Tape, Wiretap

LEASE_S = 1.0
COLD_BAR_S = 2.0
HOT_BAR_S = 1.0
SEED = 20
WAITING = 64
"""Responses without a worker, at least, when the coordinator is killed."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """One coordinator after another, in seconds from the signal on."""

    serving_s: float
    """A process that was started anew had imported everything and listened; 0: it had before."""
    acquired_s: float
    """The lease was taken."""
    leading_s: float
    """The books were open."""
    assigned_s: float
    """The first assignments passed."""


class Bench:
    """One system under test."""

    def __init__(self, system: System, tap: Wiretap) -> None:
        self.system = system
        self.tap = tap
        self.audit = Auditor(system, tap)
        self.leader, self.follower = system.coordinator, system.standby
        self.thrown_away = 0
        """Tokens that were generated and not used."""
        self.reassigned = 0
        self.random = random.Random(SEED)
        self.imports: list[float] = []
        """Seconds of importing the coordinator's modules."""

    def spec(self) -> dict[str, Any]:
        """Return a job of one step of many short responses."""
        return self.system.spec(
            rollout={"stub": {"step_s": 0.01, "mean_length": 100}},
            sampling={"max_completion_length": 200},
            algorithm={"prompts_per_step": 32},
            limits={"max_steps": 1},
        )

    def run(self, *, standby: bool) -> list[Takeover]:
        """Kill the leader in one job after another; return every takeover."""
        found = []
        for index in range(MEASUREMENTS):
            if standby:
                started = time.time()
                self.follower.start()
                wait_line(self.follower, "leader.waiting", after=started, timeout_s=60)
            else:
                # Beside each restart, so that both see the machine in the same state.
                self.imports += import_seconds("rlharvest_coordinator.service", 1)
            spec = self.spec()
            job = self.system.submit(spec)
            self.audit.wait(job, _work_waits, timeout_s=120, what="more responses than slots")
            time.sleep(self.random.uniform(0.2, 0.8))
            before = self.tap.read(job, lambda tape: tape.epoch)
            wall, at = time.time(), time.monotonic()
            self.leader.kill()
            if standby:
                self.leader, self.follower = self.follower, self.leader
                self.system.client.close()
                self.system.client = self.system.api(int(self.leader.environment["RLHARVEST_API_PORT"]))
            else:
                self.leader.start()
            found.append(self.takeover(job, before, wall, at, started=not standby))
            print(f"{'hot' if standby else 'cold'} {index + 1} of {MEASUREMENTS}: {found[-1]}", flush=True)
            counters = self.audit.end(job, spec)
            self.thrown_away += counters.get("fenced_tokens", 0) + self.tap.read(job, Tape.twice)
            self.reassigned += counters.get("reassigned", 0)
        return found

    def takeover(self, job: str, before: int, wall: float, at: float, *, started: bool) -> Takeover:
        """Wait for the next leader's first assignments."""
        self.audit.wait(
            job,
            lambda tape: tape.first_handout(above=before) is not None,
            timeout_s=60,
            what="a new coordinator's first assignments",
        )
        handout = self.tap.read(job, lambda tape: tape.first_handout(above=before))
        assert handout is not None
        serving = wait_line(self.leader, "coordinator.serving", after=wall, timeout_s=5)[0] if started else wall
        acquired, _ = wait_line(self.leader, "leader.acquired", after=wall, timeout_s=5)
        leading, _ = wait_line(self.leader, "coordinator.leading", after=wall, timeout_s=5)
        return Takeover(serving - wall, acquired - wall, leading - wall, handout.at - at)


def _work_waits(tape: Tape) -> bool:
    pending = sum(track.owner is None and not track.finished for track in tape.tracks.values())
    running = sum(track.owner is not None and not track.finished for track in tape.tracks.values())
    return pending >= WAITING and running > 0


def measure(report: Report, directory: Path) -> None:
    """Run everything."""
    settings = {"RLHARVEST_LOG_FORMAT": "json", "RLHARVEST_LEASE_S": str(LEASE_S)}
    with System(directory, workers=2, slots=8, settings=settings) as system, Wiretap(system.nats) as tap:
        bench = Bench(system, tap)
        for name, standby in (("cold", False), ("hot", True)):
            found = bench.run(standby=standby)
            if not standby:
                report.median("coordinator_import", "s", bench.imports)
                report.median("cold_serving", "s", [one.serving_s for one in found])
            report.median(f"{name}_lease_taken", "s", [one.acquired_s for one in found])
            report.median(f"{name}_books_open", "s", [one.leading_s for one in found])
            report.median(f"{name}_to_first_assignment", "s", [one.assigned_s for one in found])
    report.count("responses_compared", "responses", bench.audit.compared)
    report.count("tokens_lost", "tokens", bench.audit.lost)
    report.count("tokens_thrown_away", "tokens", bench.thrown_away)
    report.count("responses_moved", "responses", bench.reassigned)


def bars(report: Report) -> None:
    """Say what the figures must be."""
    imports = report.figures.get("coordinator_import")
    imported_s = statistics.median(imports.values) if imports is not None else float("nan")
    report.bar("cold_to_first_assignment", imported_s + COLD_BAR_S, "import + 2 s")
    report.bar("hot_to_first_assignment", LEASE_S + HOT_BAR_S, "lease + 1 s")
    report.none("tokens_lost", "tokens_thrown_away")


def main() -> int:
    """Measure, print, and return the exit status."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    return command.run("recovery", measure, bars)


if __name__ == "__main__":
    sys.exit(main())
