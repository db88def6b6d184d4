"""Streams of the gateway while workers are killed every second: `python -m benchmarks.gateway`.

Real processes, four workers with the stub engine, 20 streams at a time of 200 to 300 tokens each, asked for by the
unmodified client of OpenAI. One round without kills, then rounds in which the worker that holds the most responses is killed
every second and started again. Every stream is compared with the uninterrupted completion.

How each figure is found:

- Tokens lost: of the uninterrupted completion, not at their place. Tokens doubled: beyond it. Completions inexact: streams
  that differ in a token, a log-probability, a character or in how they ended.
- Stall per kill: the longest time between two chunks of any stream in the middle of which, or after which, the kill was.
- First token: from the request to the first chunk with a token, without kills and with them.
- Overhead: how long streams take without kills, over the same responses of the engine alone in this process; medians.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
from rlharvest.engine import EngineConfig, Request, Sampling
from rlharvest.testing.served import Streamed, serving
from rlharvest.testing.stub import StubEngine
from rlharvest.testing.system import System

from benchmarks import command
from benchmarks.audit import misplaced
from benchmarks.report import Report

STREAMS, WORKERS, SLOTS = 20, 4, 16
ROUNDS = 3
STEP_S = 0.02
LEAST, MOST = 200, 300


def measure(report: Report, directory: Path, *, rounds: int) -> None:
    """Run all rounds."""
    with (
        System(directory / "system", workers=WORKERS, slots=SLOTS) as system,
        serving(system, timeout_s=600, stub={"step_s": STEP_S}) as served,
    ):
        served.stream("to warm up: ", least=1, most=LEAST, budget=LEAST)
        with served.streams(STREAMS, least=LEAST, most=MOST) as (_, quiet):
            pass
        alone = asyncio.run(durations(quiet))
        together = [stream.arrivals[-1] - stream.started for stream in quiet]
        say(f"without kills: {statistics.median(together):.2f} s, the engine alone {statistics.median(alone):.2f} s")
        report.median("first_token", "s", [stream.arrivals[0] - stream.started for stream in quiet])
        report.count("overhead", "x", statistics.median(together) / statistics.median(alone))
        streams, stalls = list(quiet), []
        killed: list[Streamed] = []
        for number in range(rounds):
            with served.streams(STREAMS, least=LEAST, most=MOST) as (over, found):
                kills = served.kill_until(over)
            stalls += [stall(found, at) for at in kills]
            killed += found
            say(f"round {number + 1}: {len(kills)} kills, longest stall {max(stalls, default=0):.2f} s")
        streams += killed
        report.median("first_token_under_kills", "s", [stream.arrivals[0] - stream.started for stream in killed])
        report.median("stall_per_kill", "s", stalls)
        report.count("kills", "kills", len(stalls))
        report.count("completions", "streams", len(streams))
        report.count("inexact", "streams", sum(not exact(stream) for stream in streams))
        report.count("tokens_doubled", "tokens", sum(max(0, len(one.ids) - len(one.wanted.ids)) for one in streams))
        report.count("tokens_lost", "tokens", sum(misplaced(one.wanted.ids, one.ids) for one in streams))


def exact(stream: Streamed) -> bool:
    """Whether a stream is the uninterrupted completion in everything."""
    try:
        stream.check()
    except AssertionError:
        return False
    return True


def stall(streams: Sequence[Streamed], at: float) -> float:
    """Return the longest time between two chunks of a stream that a kill at this time is in."""
    gaps = [0.0]
    for stream in streams:
        times = [stream.started, *stream.arrivals]
        gaps += [later - earlier for earlier, later in pairwise(times) if earlier <= at < later]
    return max(gaps)


async def durations(streams: Sequence[Streamed]) -> list[float]:
    """Return how long the engine alone takes for as many tokens as each stream has, all at a time."""
    engine = StubEngine()
    await engine.start(EngineConfig(slots=len(streams), context=2 * MOST, options={"step_s": STEP_S}))
    await engine.load(Path(), 0)
    started = time.monotonic()
    none = np.array([], np.uint32)
    engine.submit(
        [
            Request(
                handle=handle,
                attempt=1,
                group=handle,
                seed=handle,
                prompt=np.array([handle + 2], np.uint32),
                prefix=none,
                budget=len(stream.ids),
                sampling=Sampling(),
            )
            for handle, stream in enumerate(streams)
        ]
    )
    took: dict[int, float] = {}
    while len(took) < len(streams):
        for span in await engine.spans():
            if span.finish:
                took[span.handle] = time.monotonic() - started
    await engine.close()
    return list(took.values())


def bars(report: Report) -> None:
    """Say what the figures must be."""
    report.least("kills", 10, "so that they tell something")
    report.least("completions", 2 * STREAMS, "without kills and with them")
    report.none("inexact", "tokens_lost", "tokens_doubled")


def say(text: str) -> None:
    """Show progress."""
    print(text, flush=True)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="with kills (%(default)d)")
    return command.run("gateway", partial(measure, rounds=parser.parse_args().rounds), bars)


if __name__ == "__main__":
    sys.exit(main())
