"""What many random faults cost, and that they cost no token: `python -m benchmarks.chaos`.

Real processes, real NATS and Valkey, eight stub workers. Jobs run one after another while faults of every kind (storm)
happen in the order of a schedule that is a pure function of the seed (schedule). At the end every response of every job
is compared with the uninterrupted run, token by token, and every published version with that of a job that ran before
the first fault.

How each figure is found:

- Tokens lost: tokens of the uninterrupted run that are not at their place. Tokens doubled: tokens of a response beyond
  that run, or that two pieces of it claim. rlharvest.testing.audit then checks versions, owners and counters as well.
- Batches trained twice: groups in two batches, and steps whose published weights are not those of the undisturbed job.
  A step that is replayed after a trainer's death is no fault; one that is added twice changes the weights.
- Seconds of stall per fault: the longest time without a new token on the bus that begins, or goes on, between the fault
  and the next one (echo.stalls). At staleness 0 nobody generates while the trainer computes; how long that takes is
  printed for the undisturbed job.
- A kill waits until a group has been completed since the kill before it; where none comes within PATIENCE_S the run is
  over and has failed.

`--seed N` plays one seed, the default is three of them; `--write FILE` and `--read FILE` keep and play a schedule.
`--outage S` adds a coordinator that stays away for S seconds after the last fault: workers fill their buffers and wait.
"""

from __future__ import annotations

import argparse
import copy
import heapq
import itertools
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlharvest import logs
from rlharvest.errors import RlharvestError, Unavailable
from rlharvest.testing.audit import check_job, expected
from rlharvest.testing.system import System

from benchmarks.audit import ROWS, misplaced
from benchmarks.echo import Echo, stalls
from benchmarks.journal import lines
from benchmarks.report import Report
from benchmarks.schedule import Fault, Kind, dump, load, schedule
from benchmarks.storm import Storm, Undo

WORKERS = 8
MINUTES = 8.0
SEEDS = (1, 2, 3)
STEPS = 6
PATIENCE_S = 120.0
"""Longest time without a completed group before a run has failed."""

LEAST_FAULTS = 150
LEAST_KILLS = 25
"""In eight minutes; in proportion for a run of other length."""

BUFFER = 512
"""Tokens that a worker keeps for a coordinator that is away."""


def spec_of(system: System, number: int) -> dict[str, Any]:
    """Return the job with this number: every other one is a step ahead of its trainer."""
    return system.spec(
        name="chaos",
        # Half of the responses begin so: hardly a step without a gradient, which a batch trained twice would add twice.
        rewards=[{"builtin": "regex", "params": {"pattern": "^[0-9a-m]"}}],
        rollout={"stub": {"step_s": 0.02, "mean_length": 60}},
        sampling={"max_completion_length": 100},
        staleness={"max_staleness": number % 2, "on_stale": "correct"},
        algorithm={"deterministic": True},
        limits={"max_steps": STEPS},
        weights={"keep_versions": 100},
        checkpoint={"every_steps": 2},
    )


@dataclass(slots=True)
class Found:
    """What the jobs of all runs turned out to be."""

    jobs: int = 0
    responses: int = 0
    lost: int = 0
    doubled: int = 0
    twice: int = 0
    wrong: list[str] = field(default_factory=list)
    """What else is not as it must be."""


class Jobs:
    """Keeps one job running and one waiting, from a thread of its own, until it is told to stop."""

    def __init__(self, system: System, specs: Sequence[dict[str, Any]]) -> None:
        self.system = system
        self.specs = specs
        self.submitted: list[tuple[str, dict[str, Any]]] = []
        self._enough = threading.Event()
        self._thread = threading.Thread(target=self._run, name="jobs", daemon=True)

    def start(self) -> Jobs:
        self._thread.start()
        return self

    def stop(self) -> None:
        """Submit no more."""
        self._enough.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._enough.is_set():
            try:
                open_jobs = [job for job, _ in self.submitted[-2:] if self._open(job)]
                if len(open_jobs) < 2:
                    spec = self.specs[len(self.submitted) % len(self.specs)]
                    self.submitted.append((self.system.submit(spec), spec))
                    continue
            except RlharvestError:
                pass  # the coordinator is away; a job that it took without an answer is one that nobody looks at
            self._enough.wait(0.5)

    def _open(self, job: str) -> bool:
        return self.system.job(job)["status"] not in ("succeeded", "failed", "cancelled")


def patiently(what: Callable[[], Any], *, timeout_s: float = 60.0) -> Any:
    """Ask until somebody answers."""
    end = time.monotonic() + timeout_s
    while True:
        try:
            return what()
        except RlharvestError:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


class Run:
    """One system and one schedule."""

    def __init__(self, system: System, storm: Storm, echo: Echo, found: Found) -> None:
        self.system = system
        self.storm = storm
        self.echo = echo
        self.found = found
        self.quiet_s = 0.0
        """Longest time without a new token in the undisturbed jobs."""
        self.stalls: list[float] = []
        self.happened: Counter[Kind] = Counter()
        self.kills = 0
        # Once: System.spec writes the model that every job reads.
        self.specs = [spec_of(system, number) for number in range(2)]
        self.reference: list[dict[int, set[str]]] = []
        """Digests of the versions by step, of the two kinds of jobs."""
        self._undo: list[tuple[float, int, Undo]] = []
        self._numbers = itertools.count()

    def undisturbed(self) -> None:
        """Run a job of each kind before anything goes wrong."""
        for number, spec in enumerate(self.specs):
            started = time.monotonic()
            job = self.system.submit(spec)
            self.reference.append({})
            self.audit(job, spec, number)
            mine = [at for at in self.echo.tokens if at >= started]
            self.quiet_s = max(self.quiet_s, *(after - before for before, after in itertools.pairwise(mine)))
            self.reference[number] = self.digests(job)

    def weather(self, faults: tuple[Fault, ...]) -> None:
        """Let every fault happen while jobs run; then let the jobs end.

        Raises:
            Unavailable: no group was completed for PATIENCE_S, or a job did not end.
        """
        jobs = Jobs(self.system, self.specs).start()
        start = time.monotonic()
        late = 0.0
        retired = self.echo.retired
        made: list[float] = []
        try:
            for fault in faults:
                self.wait(lambda due=start + late + fault.at: time.monotonic() >= due)  # type: ignore[misc]  # a default
                if fault.is_kill:
                    since = time.monotonic()
                    self.wait(lambda before=retired: self.echo.retired > before, timeout_s=PATIENCE_S, fault=fault)  # type: ignore[misc]  # a default
                    late += time.monotonic() - since
                    retired = self.echo.retired
                    self.kills += 1
                made.append(time.monotonic())
                print(f"{made[-1] - start:7.2f} s  {fault}", flush=True)
                undo = self.storm.apply(fault, self.echo)
                self.happened[fault.kind] += 1
                if undo is not None:
                    heapq.heappush(self._undo, (made[-1] + fault.seconds, next(self._numbers), undo))
            self.wait(lambda: not self._undo)
        finally:
            jobs.stop()
            for _, _, undo in sorted(self._undo):
                undo()
        for number, (job, spec) in enumerate(jobs.submitted):
            self.audit(job, spec, number)
        self.stalls += stalls(made, self.echo.tokens, self.echo.tokens[-1])
        longest = sorted(zip(self.stalls, made, faults, strict=True), key=lambda item: -item[0])[:5]
        for stall, at, fault in longest:
            print(f"{stall:7.2f} s without a token at {at - start:.2f} s, from {fault} on", flush=True)

    def wait(self, done: Callable[[], bool], *, timeout_s: float = 1e9, fault: Fault | None = None) -> None:
        """Wait until `done`, and end what is due to end meanwhile."""
        end = time.monotonic() + timeout_s
        while not done():
            while self._undo and self._undo[0][0] <= time.monotonic():
                heapq.heappop(self._undo)[2]()
            if time.monotonic() > end:
                logs = "\n".join(f"--- {service.name}\n{service.tail()}" for service in self.system.services)
                raise Unavailable(f"no group was completed for {timeout_s:g} s before {fault}\n{logs}")
            time.sleep(0.02)

    def outage(self, seconds: float) -> None:
        """Take the coordinator away in a job for a long time; nothing of what workers had is thrown away."""
        spec = copy.deepcopy(self.specs[0])
        # Forty seconds: they are still being generated when it is seen that they are, also on a busy machine.
        spec["rollout"]["stub"] = {"step_s": 0.08, "length": 480}
        spec["sampling"]["max_completion_length"] = 490  # the model's context is 512
        spec["algorithm"]["prompts_per_step"] = WORKERS
        spec["limits"]["max_steps"] = 1
        job = self.system.submit(spec)
        before = self.echo.retired

        def amid() -> bool:
            found = self.system.job(job)
            if found["status"] == "failed":
                raise Unavailable(f"the job of the outage failed: {found['error']}")
            begun: int = sum(sample["length"] >= 5 for sample in self.system.client.live_samples(job))
            held: int = sum(seen["held"] for seen in self.system.client.workers())
            return begun >= 2 * WORKERS and held >= 2 * WORKERS

        self.system.until(amid, timeout_s=PATIENCE_S, what="responses in the middle of their generation")
        holding = {seen["pid"] for seen in self.system.client.workers() if seen["held"] >= 2}
        holders = [worker for worker in self.system.workers if worker.process and worker.process.pid in holding]
        since = time.time()
        self.system.coordinator.kill()
        print(f"the coordinator is away for {seconds:g} s", flush=True)
        time.sleep(seconds)
        idle = [worker.name for worker in holders if not any(lines(worker, "generation.paused", after=since))]
        if idle or not holders:
            self.found.wrong.append(f"{idle} of {len(holders)} workers did not fill their buffers and pause")
        assert self.echo.retired == before
        self.system.coordinator.start()
        self.system.ready()
        counters = self.audit(job, spec, 0, compare=False)
        if counters.get("reassigned", 0):
            self.found.wrong.append(f"{counters['reassigned']} responses were moved though no worker was away")

    def digests(self, job: str) -> dict[int, set[str]]:
        """Return the digests of a job's versions by step."""
        found: dict[int, set[str]] = {}
        for version in patiently(lambda: self.system.client.weights(job)):
            found.setdefault(version["step"], set()).add(version["digest"])
        return found

    def audit(self, job: str, spec: dict[str, Any], number: int, *, compare: bool = True) -> dict[str, int]:
        """Wait for a job's end, compare it with the uninterrupted run, and note what differs; return its counters."""
        found = self.found
        found.jobs += 1
        try:
            job_found = patiently(lambda: self.system.wait(job, "succeeded", timeout_s=300))
        except AssertionError as problem:
            found.wrong.append(f"job {number} ({job}): {problem}")
            return {}
        samples = patiently(lambda: self.system.samples(job))
        found.responses += len(samples)
        for sample in samples.values():
            wanted = expected(spec, sample, ROWS)[0]
            claimed = sum(piece["n"] for piece in sample["pieces"])
            found.lost += misplaced(wanted, sample["token_ids"])
            found.doubled += max(0, len(sample["token_ids"]) - len(wanted)) + max(0, claimed - len(sample["token_ids"]))
        try:
            check_job(spec, job_found, samples, rows=ROWS)
        except AssertionError as problem:
            found.wrong.append(f"job {number} ({job}): {problem}")
        reference = self.reference[number % 2]
        if reference and compare:
            mine = self.digests(job)
            found.twice += sum(mine.get(step) != digests for step, digests in reference.items())
        steps = patiently(lambda: self.system.client.metrics(job))["steps"]
        found.twice += len(steps) - len(set(steps))
        print(f"job {number} {job}: {len(samples)} responses, {dict(job_found['counters'])}", flush=True)
        return dict(job_found["counters"])


def play(directory: Path, faults: tuple[Fault, ...], found: Found, *, outage_s: float) -> Run:
    """Run one schedule on a system of its own."""
    settings = {"RLHARVEST_LOG_FORMAT": "json", "RLHARVEST_BUFFER_TOKENS": str(BUFFER)}
    system = System(directory, workers=WORKERS, slots=8, settings=settings)
    storm = Storm(system)
    workers, system.workers = system.workers, []
    try:
        with system, Echo(system.nats) as echo:
            # Not all at once: a dozen interpreters that import on two processors keep the coordinator waiting.
            system.workers = [worker.start() for worker in workers]
            run = Run(system, storm, echo, found)
            run.undisturbed()
            run.weather(faults)
            if outage_s:
                run.outage(outage_s)
    finally:
        storm.close()
    return run


def measure(report: Report, directory: Path, options: argparse.Namespace) -> None:
    """Play every seed."""
    found = Found()
    everything: list[float] = []
    quiet: list[float] = []
    happened: Counter[Kind] = Counter()
    faults_a_run, kills_a_run = [], []
    try:
        for seed in options.seed or SEEDS:
            faults = schedule(seed, minutes=options.minutes, workers=WORKERS)
            if options.read:
                faults = load(options.read.read_text(encoding="utf-8"))
            if options.write:
                options.write.write_text(dump(faults), encoding="utf-8")
            print(
                f"seed {seed}: {len(faults)} faults. Again: python -m benchmarks.chaos --seed {seed} "
                f"--minutes {options.minutes:g}",
                flush=True,
            )
            run = play(directory / str(seed), faults, found, outage_s=options.outage)
            everything += run.stalls
            quiet.append(run.quiet_s)
            happened += run.happened
            faults_a_run.append(sum(run.happened.values()))
            kills_a_run.append(run.kills)
            report.count("tokens_lost", "tokens", found.lost)
    finally:
        for problem in found.wrong:
            print(f"WRONG: {problem}", flush=True)
    report.count("seeds", "runs", len(faults_a_run))
    report.count("faults", "faults", sum(faults_a_run))
    report.count("kills", "kills", sum(kills_a_run))
    report.count("least_faults_of_a_run", "faults", min(faults_a_run))
    report.count("least_kills_of_a_run", "kills", min(kills_a_run))
    for kind, n in sorted(happened.items()):
        report.count(f"of_it_{kind}", "faults", n)
    report.count("jobs", "jobs", found.jobs)
    report.count("responses_checked", "responses", found.responses)
    report.count("tokens_lost", "tokens", found.lost)
    report.count("tokens_doubled", "tokens", found.doubled)
    report.count("batches_trained_twice", "batches", found.twice)
    report.count("jobs_that_do_not_add_up", "jobs", len(found.wrong))
    report.median("stall_per_fault", "s", everything)
    report.count("stall_most", "s", max(everything))
    report.count("stall_undisturbed", "s", max(quiet))


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, action="append", help="of the schedule; may be given several times")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="length of each run (%(default)g)")
    parser.add_argument("--outage", type=float, default=0.0, metavar="S", help="take the coordinator away at the end")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="a new directory for all files of the run, logs too")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the schedule to a file")
    parser.add_argument("--read", type=Path, metavar="FILE", help="play the schedule of a file")
    options = parser.parse_args()
    if (options.write or options.read) and (len(options.seed or ()) != 1):
        parser.error("--write and --read are for one seed: give --seed N")
    logs.configure("chaos", level="error", style="console")
    report = Report("chaos")
    with tempfile.TemporaryDirectory(prefix="rlharvest-bench-") as directory:
        try:
            measure(report, options.keep or Path(directory), options)
        finally:
            share = min(1.0, options.minutes / MINUTES)
            report.least("least_faults_of_a_run", int(LEAST_FAULTS * share), "in each run")
            report.least("least_kills_of_a_run", int(LEAST_KILLS * share), "in each run")
            report.none("tokens_lost", "tokens_doubled", "batches_trained_twice", "jobs_that_do_not_add_up")
            status = report.finish()
    return status


if __name__ == "__main__":
    sys.exit(main())
