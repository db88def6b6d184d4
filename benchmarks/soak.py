"""Whether anything grows: `python -m benchmarks.soak`.

One job of 300 optimizer steps on the smallest model and the stub engine, every service a real process. At each step the
memory of each process is read (resident set, with that of its children), and what Valkey and NATS hold. What grows while
a system warms up is no leak, so the slope is taken over steps 100 to 300, after another job of the same kind ran for
WARM_S and was cancelled: NATS remembers the ids of messages for two minutes (bus.DUPLICATE_WINDOW_S), however many steps
those are, and whatever stays of a job that is over counts as well.

How each figure is found:

- Slope of a process: least squares over the samples of the last two thirds, kB a step; `least` is the lower end of its
  95 % confidence interval (benchmarks.trend). A bar is met by a slope of at most 20 kB a step whose interval begins at
  or below 0.
- Slope of the store: `used_memory` of Valkey, likewise.
- Live keys: the most keys in Valkey at a sample, in the last third less those in the third before it.
- Stream: bytes of all four streams of NATS at the last sample; events and wake-ups stay for days, so they rise.
- Other things that could pile up, from the coordinator's own metrics and /proc: open files and threads of each process,
  the last sample less the one at a third.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import redis
from rlharvest import bus
from rlharvest.testing.audit import check_job
from rlharvest.testing.system import System

from benchmarks import command
from benchmarks.report import Report
from benchmarks.trend import trend

STEPS = 300
MOST_STEPS = 100_000
SLOPE_BAR_KB = 20.0
POLL_S = 0.02
STALL_S = 300.0
"""A job without a step for this long has stopped."""

WARM_S = 1.25 * bus.DUPLICATE_WINDOW_S
"""How long the job before runs."""


@dataclass(slots=True)
class Sample:
    """Everything at one step."""

    step: int
    resident_kb: dict[str, float] = field(default_factory=dict)
    """Process -> its memory with that of its children."""
    handles: dict[str, int] = field(default_factory=dict)
    """Process -> open files and threads."""
    store_kb: float = 0.0
    keys: int = 0


def spec(system: System, steps: int) -> dict[str, Any]:
    """Return the job: short responses, so that much happens in little time."""
    return system.spec(
        sampling={"num_generations": 2, "max_completion_length": 16},
        algorithm={"prompts_per_step": 2},
        staleness={"max_staleness": 1},
        rollout={"stub": {"step_s": 0.002, "mean_length": 8}},
        checkpoint={"every_steps": 10, "keep": 2},
        weights={"keep_versions": 2},
        limits={"max_steps": steps},
    )


def take(system: System, store: redis.Redis, step: int) -> Sample:
    """Read everything now."""
    sample = Sample(step)
    for name, process in processes(system):
        family = [process, *process.children(recursive=True)]
        sample.resident_kb[name] = sum(each.memory_info().rss for each in family) / 1024
        sample.handles[name] = process.num_fds() + process.num_threads()
    info: Any = store.info("memory")
    sample.store_kb = info["used_memory"] / 1024
    sample.keys = int(store.dbsize())
    return sample


def processes(system: System) -> Iterator[tuple[str, psutil.Process]]:
    """Yield everything that runs, by name."""
    for service in system.services:
        if service.process is not None and service.running:
            yield service.name, psutil.Process(service.process.pid)
    for name, server in (("nats", system.nats), ("valkey", system.valkey)):
        assert server.process is not None
        yield name, psutil.Process(server.process.pid)


def follow(system: System, job: str, steps: int) -> list[Sample]:
    """Take a sample at each step until the job ends."""
    samples: list[Sample] = []
    heard = time.monotonic()
    with redis.Redis.from_url(system.valkey.url) as store:
        while True:
            shown = system.job(job)
            step = shown["progress"]["step"]
            if not samples or step > samples[-1].step:
                samples.append(take(system, store, step))
                heard = time.monotonic()
                if step % 50 == 0:
                    print(f"step {step}/{steps}", file=sys.stderr, flush=True)
            if shown["status"] in ("succeeded", "failed"):
                return samples
            if time.monotonic() - heard > STALL_S:
                raise AssertionError(f"no step after {step} for {STALL_S:g} s: {shown['status_detail']}")
            time.sleep(POLL_S)


def warm(system: System) -> None:
    """Run a job until everything that is bounded by time is full; cancel it."""
    job = system.submit(spec(system, MOST_STEPS))
    system.until(lambda: system.job(job)["progress"]["step"] > 0, timeout_s=STALL_S, what="a first step")
    time.sleep(WARM_S)
    system.client.cancel(job)
    system.wait(job, "cancelled")


def stream_bytes(system: System) -> int:
    """Return what NATS keeps."""

    async def read() -> int:
        client = await bus.connect(system.nats.url, "soak", credential=system.nats.credential)
        found = await bus.ensure_streams(client.jetstream())
        await client.close()
        return sum(info.state.bytes for info in found.values())

    return asyncio.run(read())


def measure(report: Report, directory: Path, *, steps: int) -> None:
    """Run everything."""
    with System(directory, workers=2, slots=4) as system:
        warm(system)
        given = spec(system, steps)
        job = system.submit(given)
        began = time.monotonic()
        samples = follow(system, job, steps)
        report.count("seconds", "s", time.monotonic() - began)
        check_job(given, system.wait(job, "succeeded"), system.samples(job))
        report.count("stream_bytes", "B", stream_bytes(system))
    describe(report, samples, steps)


def describe(report: Report, samples: list[Sample], steps: int) -> None:
    """Put what the samples say into the report."""
    late = [sample for sample in samples if sample.step > steps // 3]
    report.count("samples", "samples", len(late))
    at = [float(sample.step) for sample in late]
    series = {name: [sample.resident_kb[name] for sample in late] for name in late[0].resident_kb}
    series["store"] = [sample.store_kb for sample in late]
    for name, values in series.items():
        found = trend(at, values)
        name = name.replace("-", "_")
        report.count(f"{name}_slope", "kB/step", found.slope)
        report.count(f"{name}_slope_least", "kB/step", found.low)
        report.count(f"{name}_last", "kB", values[-1])
    half = len(late) // 2
    report.count(
        "live_keys_growth", "keys", max(each.keys for each in late[half:]) - max(each.keys for each in late[:half])
    )
    growth = {name: late[-1].handles[name] - late[0].handles[name] for name in late[0].handles}
    report.count("handles_growth", "files and threads", max(growth.values()))


def bars(report: Report) -> None:
    """Say what the figures must be."""
    for name in [*SERVICES, "store"]:
        report.bar(f"{name}_slope", SLOPE_BAR_KB, "kB a step")
        report.bar(f"{name}_slope_least", 0, "the interval includes 0")
    report.bar("live_keys_growth", 0, "constant")
    report.bar("handles_growth", 8, "constant but for pools")


SERVICES = ("coordinator", "rollout_0", "rollout_1", "trainer", "reward", "weights", "nats", "valkey")


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=STEPS, help=f"optimizer steps ({STEPS}; fewer prove less)")
    steps = parser.parse_args().steps
    return command.run("soak", lambda report, directory: measure(report, directory, steps=steps), bars)


if __name__ == "__main__":
    sys.exit(main())
