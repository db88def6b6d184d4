"""How fast tokens come into the ledger: `python -m benchmarks.ingest`.

Real NATS, real Valkey, and on two processors with them: two publishing processes and one with the coordinator's log reader,
fold, store, purge and acknowledgements. Each worker has 64 live responses and sends 16 tokens of each in a flush, one flush
on its way at a time, as the real worker does; the next goes out with the PubAck of the last. The messages are built before
the clock starts, so sampling costs nothing; nothing else is left out between a worker's buffer and its acknowledgement. What
the coordinator does besides (dispatch, SQL, rewards) is not in it, but for one figure: a round over all live responses.

How each figure is found:

- Tokens a second with n workers: all tokens of a job over the time from the first publication until every token was covered
  by a LedgerAck that reached its worker, so that it is in the log, folded, in Valkey and acknowledged.
- Processor seconds per million tokens: of all processes, and of the coordinator's, over the same time.
- Tokens wrong: tokens whose id, log-probability, version, place or finish differs from what was published, in the book and
  in the one that is rebuilt from Valkey.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from rlharvest import bus
from rlharvest.testing.servers import NatsServer, ValkeyServer

from benchmarks import command
from benchmarks.ingest import control
from benchmarks.ingest.load import Load
from benchmarks.ingest.rounds import beat_ms, round_ms
from benchmarks.report import MEASUREMENTS, Report

WORKERS = (1, 8, 64, 512)
PUBLISHERS = 2
PROCESSORS = 2
BAR = 1_000_000
TOKENS = 4 << 20
"""Of one job, at least."""


@dataclass(slots=True)
class Figures:
    """What was measured with one number of workers."""

    per_s: list[float]
    cpu_s: list[float]
    coordinator_cpu_s: list[float]


class Bench:
    """The processes under test."""

    def __init__(self, nats: Client, pids: dict[str, int]) -> None:
        self.nats = nats
        self.pids = pids
        self.jobs = 0
        self.wrong = self.tokens = 0

    async def job(self, workers: int, least: int, figures: Figures) -> None:
        """Publish one job and check it."""
        self.jobs += 1
        load = Load(f"rljob_{self.jobs:08d}", workers)
        load = Load(load.job, workers, waves=max(1, least // (workers * load.tokens)))
        tokens = workers * load.tokens
        sent = asdict(load)
        await control.ask(self.nats, "receiver", do="open", load=sent)
        await self._publishers(do="prepare", load=sent)
        before = {name: _cpu_s(pid) for name, pid in self.pids.items()}
        times = await self._publishers(do="publish")
        spent = {name: _cpu_s(pid) - before[name] for name, pid in self.pids.items()}
        seconds = max(time["end"] for time in times) - min(time["start"] for time in times)
        checked = await control.ask(self.nats, "receiver", do="check", load=sent)
        await control.ask(self.nats, "receiver", do="close", load=sent)
        self.tokens += tokens
        self.wrong += checked["wrong"] + checked["wrong_stored"]
        figures.per_s.append(tokens / seconds)
        figures.cpu_s.append(1e6 * sum(spent.values()) / tokens)
        figures.coordinator_cpu_s.append(1e6 * spent["receiver"] / tokens)
        print(
            f"{workers} workers: {tokens} tokens in {seconds:.2f} s, {tokens / seconds / 1e6:.3f} M/s, "
            f"{checked['messages']} messages in {checked['batches']} batches, processors "
            + ", ".join(f"{name} {used / seconds:.2f}" for name, used in spent.items()),
            flush=True,
        )

    async def _publishers(self, **request: Any) -> list[dict[str, Any]]:
        asked = (control.ask(self.nats, f"publisher.{index}", **request) for index in range(PUBLISHERS))
        return await asyncio.gather(*asked)


def _cpu_s(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def system(directory: Path) -> Iterator[tuple[str, dict[str, int]]]:
    """Start servers and processes; yield the URL of NATS and the process of each."""
    nats, valkey = NatsServer(directory / "nats"), ValkeyServer(directory / "valkey")
    children: dict[str, subprocess.Popen[bytes]] = {}
    try:
        for server in (nats, valkey):
            server.start()
            assert server.process is not None
            children[server.name] = server.process
        arguments = {"receiver": [nats.url, valkey.url]} | {
            f"publisher.{index}": [nats.url, str(index), str(PUBLISHERS)] for index in range(PUBLISHERS)
        }
        for name, rest in arguments.items():
            module = f"benchmarks.ingest.{name.partition('.')[0]}"
            children[name] = subprocess.Popen([sys.executable, "-m", module, *rest], stdin=subprocess.DEVNULL)
        yield nats.url, {name: child.pid for name, child in children.items()}
    finally:
        for name in reversed(children):
            children[name].terminate()
            children[name].wait()


async def _measure(report: Report, directory: Path, repeat: int, tokens: int) -> Bench:
    with system(directory) as (url, pids):
        nats = await bus.connect(url, "bench")
        bench = Bench(nats, pids)
        for workers in WORKERS:
            figures = Figures([], [], [])
            for _ in range(repeat):
                await bench.job(workers, tokens, figures)
            report.median(f"tokens_per_s_{workers}_workers", "tokens/s", figures.per_s)
            report.median(f"cpu_s_per_million_{workers}_workers", "s", figures.cpu_s)
            report.median(f"coordinator_cpu_s_per_million_{workers}_workers", "s", figures.coordinator_cpu_s)
        await nats.close()
    return bench


def measure(report: Report, directory: Path, *, repeat: int, tokens: int) -> None:
    """Measure everything, on PROCESSORS of the processors."""
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:PROCESSORS])
    bench = asyncio.run(_measure(report, directory, repeat, tokens))
    most = Load("rljob_rounds", max(WORKERS))
    report.median(f"round_over_{most.workers}_workers", "ms", round_ms(most, repeat))
    report.median(f"heartbeats_of_{most.workers}_workers", "ms", beat_ms(most, repeat))
    # Last, so that a run which was broken off has none.
    report.count("tokens_checked", "tokens", bench.tokens)
    report.count("tokens_wrong", "tokens", bench.wrong)


def bars(report: Report) -> None:
    """Say what the figures must be."""
    for workers in WORKERS[1:]:
        report.least(f"tokens_per_s_{workers}_workers", BAR, "1 M tokens/s")
    report.none("tokens_wrong")


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--repeat", type=int, default=MEASUREMENTS, help="jobs for each number of workers (%(default)d)"
    )
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens of one job, at least (%(default)d)")
    options = parser.parse_args()
    return command.run("ingest", partial(measure, repeat=options.repeat, tokens=options.tokens), bars)


if __name__ == "__main__":
    sys.exit(main())
