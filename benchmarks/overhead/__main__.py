"""What the system costs a worker: `python -m benchmarks.overhead`.

One worker process in the running system (real NATS, Valkey, SQL, coordinator, weight, reward and trainer processes) against
the same engine alone in a process: same model, settings, prompts, seeds and budgets, in turn, A B A B. All responses of a
job have the same length, and there are several times as many as the worker has slots, so the time in which a slot is empty
between a response and the next is part of what is measured. Generation is; training is not: once the first version is
published, the trainer, which would have a device of its own, is stopped until the responses are there.

How each figure is found:

- Tokens a second: tokens over the time from the first of them to the last (pace.Pace). In the system they are seen when they
  are published to the log, without it when the engine hands them over.
- Share: tokens a second in the system over those of the engine alone, medians of the two. For the torch engine, with a small
  model, and for the stub engine, whose tokens take as long as they are told and cost nothing.
- Tokens missing: tokens that a job should have brought and did not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.spans import unpack
from rlharvest.testing.model import tiny_model
from rlharvest.testing.system import Service, System
from rlharvest.v1 import fleet_pb2
from safetensors.numpy import load_file, save_file

from benchmarks import command
from benchmarks.overhead.alone import Recording
from benchmarks.overhead.pace import Pace
from benchmarks.report import MEASUREMENTS, Report

SLOTS = 16
WAVES = 3
"""Responses of a job for each slot."""
LENGTH = 512
SHARE_BAR = 0.95
ENGINES = ("torch", "stub")
SAMPLES = 4
"""Responses to one prompt."""


def endless_model(directory: Path) -> Path:
    """Write a small Llama that never samples its end-of-sequence id, so that every response has its full length."""
    tiny_model(directory, hidden=128, layers=4, context=LENGTH + 64)
    path = directory / "model.safetensors"
    eos = json.loads((directory / "config.json").read_text(encoding="utf-8"))["eos_token_id"]
    tensors = load_file(path)
    embeddings = tensors["model.embed_tokens.weight"].copy()
    # Every token has the same first coordinate, which so is large in what the head sees, and the head is tied to these.
    embeddings[:, 0] = 1.0
    embeddings[eos, 0] = -20.0
    save_file({**tensors, "model.embed_tokens.weight": embeddings}, path, metadata={"format": "pt"})
    return directory


class Bench:
    """One system, and one worker of it for one engine after another."""

    def __init__(self, system: System, nats: Client, waves: int) -> None:
        self.system = system
        self.nats = nats
        self.waves = waves
        self.model = endless_model(system.directory / "endless")
        self.missing = 0
        self._recording = Recording(self.model)
        self._pace = Pace()

    @property
    def responses(self) -> int:
        """Responses of one job."""
        return SLOTS * self.waves

    async def listen(self) -> None:
        """Hear what the worker is told and what it publishes."""
        await self.nats.subscribe(bus.subject("lease", "*", "*"), cb=self._leased)
        await self.nats.subscribe(bus.subject("assign", "*", "*"), cb=self._assigned)
        await self.nats.subscribe(bus.subject("spans", "*", "*"), cb=self._published)
        await self.nats.flush()

    async def _leased(self, message: Msg) -> None:
        lease = fleet_pb2.Lease.FromString(message.data)
        if lease.job:
            self._recording.lease = lease

    async def _assigned(self, message: Msg) -> None:
        self._recording.assignments.append(fleet_pb2.Assignments.FromString(message.data))

    async def _published(self, message: Msg) -> None:
        self._pace.add(time.monotonic(), sum(len(span.ids) for span in unpack(message.data).spans))

    async def inside(self, engine: str) -> tuple[float, Recording]:
        """Run one job; return the tokens a second, and what the worker was told."""
        self._recording, self._pace = Recording(self.model), Pace()
        job = await asyncio.to_thread(self.system.submit, self._spec(engine))
        wanted = self.responses * LENGTH
        await self._until(lambda: self._pace.tokens > 0, 120, "the first tokens")
        trainer = self.system.trainer
        trainer.signal(signal.SIGSTOP)
        try:
            await self._until(lambda: self._pace.tokens >= wanted, 600, f"{wanted} tokens")
        finally:
            trainer.signal(signal.SIGCONT)
        self.missing += abs(wanted - self._pace.tokens)
        await asyncio.to_thread(self.system.client.cancel, job)
        await asyncio.to_thread(self.system.wait, job, "cancelled", "succeeded", timeout_s=120)
        return self._pace.per_s, self._recording

    async def _until(self, done: Any, timeout_s: float, what: str) -> None:
        await asyncio.to_thread(self.system.until, done, timeout_s=timeout_s, what=what)

    def _spec(self, engine: str) -> dict[str, Any]:
        return self.system.spec(
            model=str(self.model),
            sampling={"num_generations": SAMPLES, "max_completion_length": LENGTH},
            algorithm={"prompts_per_step": self.responses // SAMPLES},
            rollout={"engine": engine, "stub": {"step_s": 0.01} if engine == "stub" else {}},
            limits={"max_steps": 1},
        )

    async def alone(self, recording: Recording, worker: Service, number: int) -> float:
        """Return the tokens a second of the engine without a system."""
        directory = self.system.directory / f"recording.{number}"
        recording.save(directory)
        command_line = [sys.executable, "-m", "benchmarks.overhead.alone", str(directory)]
        environment = {**os.environ, **worker.environment}
        run = partial(subprocess.run, command_line, env=environment, check=True, stdout=subprocess.PIPE)
        answer = json.loads((await asyncio.to_thread(run)).stdout.splitlines()[-1])
        self.missing += abs(self.responses * LENGTH - int(answer["tokens"]))
        return float(answer["per_s"])


async def _measure(report: Report, directory: Path, repeat: int, waves: int) -> None:
    settings = {"RLHARVEST_LOG_FORMAT": "json"}
    with System(directory, workers=0, slots=SLOTS, settings=settings) as system:
        nats = await bus.connect(system.nats.url, "bench", credential=system.nats.credential)
        bench = Bench(system, nats, waves)
        await bench.listen()
        number = 0
        for engine in ENGINES:
            worker = system.worker(0)
            worker.environment["RLHARVEST_ENGINES"] = engine
            worker.start()
            alone, inside = [], []
            # The first one warms everything up and shows what the worker is told.
            _, recording = await bench.inside(engine)
            for _ in range(repeat):
                number += 1
                alone.append(await bench.alone(recording, worker, number))
                per_s, recording = await bench.inside(engine)
                inside.append(per_s)
                print(f"{engine}: alone {alone[-1]:.0f} tokens/s, in the system {inside[-1]:.0f}", flush=True)
            worker.stop()
            report.median(f"{engine}_alone", "tokens/s", alone)
            report.median(f"{engine}_in_the_system", "tokens/s", inside)
            report.count(f"{engine}_share", "", statistics.median(inside) / statistics.median(alone))
        await nats.close()
    # Last, so that a run which was broken off has none.
    report.count("tokens_missing", "tokens", bench.missing)


def measure(report: Report, directory: Path, *, repeat: int, waves: int) -> None:
    """Measure everything."""
    asyncio.run(_measure(report, directory, repeat, waves))


def bars(report: Report) -> None:
    """Say what the figures must be."""
    for engine in ENGINES:
        report.least(f"{engine}_share", SHARE_BAR, "of the engine alone")
    report.none("tokens_missing")


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=MEASUREMENTS, help="jobs of each engine (%(default)d)")
    parser.add_argument("--waves", type=int, default=WAVES, help="responses of a job for each slot (%(default)d)")
    options = parser.parse_args()
    return command.run("overhead", partial(measure, repeat=options.repeat, waves=options.waves), bars)


if __name__ == "__main__":
    sys.exit(main())
