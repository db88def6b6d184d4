"""Bad input at every entrance, for minutes: `python -m benchmarks.fuzz --minutes 5`.

Real processes, real NATS and Valkey, the stub engine. While job after job runs, requests are made up from the REST
description, every gRPC method gets wrong, cut and oversized messages, and every subject of the bus gets what nobody should
publish, each entrance for its minutes. The seed is printed; the same seed makes up the same input.

Figures: inputs sent; answers that were not as described; rows of the job that was over that changed; services that died or
raised what nobody foresaw; jobs whose tokens were not exactly those of the uninterrupted run. The bar of each is 0.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from rlharvest import logs
from rlharvest.testing.system import System

from benchmarks.fuzz import stage, still
from benchmarks.fuzz.bus import Bus
from benchmarks.fuzz.calls import Caller, Target
from benchmarks.fuzz.rest import Rest
from benchmarks.report import Report

PART = ("rest", "grpc", "bus")
ROUND = 20
"""Messages made up of each type in a round."""

Round = Callable[[System, Target, int], tuple[int, list[str]]]
"""One round of an entrance: (inputs, faults)."""


def rest(system: System, target: Target, seed: int) -> tuple[int, list[str]]:
    """Make requests up."""
    fuzzer = Rest(system, target, seed=seed)
    fuzzer.run(n=ROUND // 2)
    return fuzzer.outcome.calls, fuzzer.outcome.faults


def grpc(system: System, target: Target, seed: int) -> tuple[int, list[str]]:
    """Call every method, with a token and without."""

    async def both() -> tuple[int, list[str]]:
        calls, faults = 0, []
        for known in (True, False):
            async with Caller(system, known=known) as caller:
                await caller.run(target, n=ROUND, seed=seed, oversized=known)
            calls += caller.outcome.calls
            faults += caller.outcome.faults
        return calls, faults

    return asyncio.run(both())


def bus(system: System, target: Target, seed: int) -> tuple[int, list[str]]:
    """Publish on every subject."""
    fuzzer = Bus(system, target, seed=seed)
    asyncio.run(fuzzer.run(n=ROUND))
    return fuzzer.published, []


ROUNDS: dict[str, Round] = {"rest": rest, "grpc": grpc, "bus": bus}


def measure(report: Report, directory: Path, *, parts: list[str], minutes: float, seed: int) -> None:
    """Run every part for so many minutes."""
    wrong: list[str] = []
    changed: list[str] = []
    inexact = 0
    # A line of JSON holds the whole of what went wrong.
    with System(directory, workers=2, settings={"RLHARVEST_LOG_FORMAT": "json"}) as system:
        over = stage.finished(system)
        before = still.look(system, over)
        for part in parts:
            end = time.monotonic() + 60 * minutes
            inputs = turn = 0
            while turn == 0 or time.monotonic() < end:
                try:
                    with stage.running(system, over, steps=2) as target:
                        n, faults = ROUNDS[part](system, target, seed + turn)
                except AssertionError as error:
                    inexact += 1
                    faults, n = [f"{part}, seed {seed + turn}: {str(error)[:2000]}"], 0
                for fault in faults:
                    print(f"WRONG: {fault}", flush=True)
                inputs += n
                wrong += faults
                turn += 1
                print(f"{part}: round {turn}, {inputs} inputs, {len(wrong)} wrong", flush=True)
            report.count(f"{part}_inputs", "inputs", inputs)
        changed = still.differences(before, still.look(system, over))
        unforeseen = still.problems(system)
    for line in [*changed[:20], *unforeseen[:20]]:
        print(f"WRONG: {line}", flush=True)
    report.count("wrong_answers", "answers", len(wrong))
    report.count("changes", "changes", len(changed))
    report.count("unforeseen_errors", "lines", len(unforeseen))
    report.count("jobs_inexact", "jobs", inexact)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=5.0, help="for each entrance (5)")
    parser.add_argument("--seed", type=int, default=None, help="unset: another one each time")
    parser.add_argument("--only", choices=PART, action="append", help="this entrance only; repeatable")
    arguments = parser.parse_args()
    seed = random.randrange(2**31) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)
    # Thousands of inputs are refused, each with a warning of the client that sent it.
    logs.configure("fuzz", level="error", style="console")
    report = Report("fuzz")
    with tempfile.TemporaryDirectory(prefix="rlharvest-bench-") as directory:
        try:
            measure(report, Path(directory), parts=arguments.only or list(PART), minutes=arguments.minutes, seed=seed)
        finally:
            report.none("wrong_answers", "changes", "unforeseen_errors", "jobs_inexact")
            status = report.finish()
    return status


if __name__ == "__main__":
    sys.exit(main())
