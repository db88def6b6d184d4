"""An engine with responses in flight, whose version is switched again and again.

Called as a process of its own, with the Python that has the engine: `python -m benchmarks.inflight.flight FILE`, where FILE
is what `Plan.save` wrote; prints one JSON line with an Outcome. Half of the responses are sampled at temperature 1, half are
greedy, so that a fresh engine of the new version gives the same token next and its log-probability can be compared.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import numpy as np
from rlharvest.engine import Engine, EngineConfig, Kv, Request, Sampling
from rlharvest.speculation.options import Speculation
from rlharvest_rollout.engine_catalog import make_engine
from rlharvest_rollout.settings import RolloutSettings

CONTEXT = 768
GREEDY = Sampling(temperature=0.0)
SAMPLED = Sampling(temperature=1.0)
_QUIET_S = 1.0
"""Without a token for so long, an engine that was paused has handed over everything."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is to be done."""

    engine: Literal["torch", "vllm"]
    kv: Kv
    directories: tuple[str, str]
    """The first version, and the one that follows it; they take turns."""
    prompts: list[list[int]]
    """Of the responses in flight."""
    probes: list[list[int]]
    """Of the requests that come after the first switch."""
    switches: int
    tokens: int
    """That each response gets between two switches, at least."""

    def save(self, path: Path) -> Path:
        """Write it to a file; return that."""
        path.write_text(json.dumps(asdict(self)), encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> Plan:
        """Return what `save` wrote."""
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    @property
    def config(self) -> EngineConfig:
        """What the engine is told."""
        slots = len(self.prompts) + len(self.probes)
        off = Speculation(enabled="off")
        return EngineConfig(slots=slots, context=CONTEXT, kv=self.kv, speculation=off, options={})


@dataclass(slots=True)
class Track:
    """One response."""

    prompt: list[int]
    greedy: bool
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    """Of each token."""


@dataclass(slots=True)
class Outcome:
    """What came of it; times in seconds."""

    pauses: list[float] = field(default_factory=list)
    """From the last token of the old version to the first one of the new, less an ordinary step."""
    settled: list[float] = field(default_factory=list)
    """The same to the first token of the last response."""
    steps: list[float] = field(default_factory=list)
    """Median time between tokens before a switch."""
    prefixes: list[int] = field(default_factory=list)
    """Tokens of prompts and responses in flight at a switch."""
    loads: list[float] = field(default_factory=list)
    """From the call of `load` to its return."""
    responses: list[Track] = field(default_factory=list)
    aborted: int = 0
    """Responses that got no token after the last switch."""
    thrown_away: int = 0
    """Tokens that the engine counted and nobody got."""
    probes: list[tuple[float, float]] = field(default_factory=list)
    """Log-probability of the first token of each new request, and of a fresh engine's."""
    running: list[tuple[float, float]] = field(default_factory=list)
    """Of the first token after the first switch of each greedy response, likewise."""


class Flight:
    """An engine, and what came out of it."""

    def __init__(self, plan: Plan) -> None:
        self.engine: Engine = make_engine(plan.engine, RolloutSettings())
        self.tracks: dict[int, Track] = {}
        self.arrivals: list[float] = []

    def submit(
        self, handle: int, prompt: list[int], sampling: Sampling, *, budget: int, prefix: Sequence[int] = ()
    ) -> None:
        """Start a response."""
        self.tracks[handle] = Track(prompt=prompt, greedy=sampling is GREEDY, ids=list(prefix))
        request = Request(
            handle=handle,
            attempt=1,
            group=handle,
            seed=handle,
            prompt=np.array(prompt, np.uint32),
            prefix=np.array(prefix, np.uint32),
            budget=budget,
            sampling=sampling,
        )
        self.engine.submit([request])

    async def take(self) -> float:
        """Wait for tokens, append them; return when they came.

        Raises:
            AssertionError: a token is missing or came twice.
        """
        spans = await self.engine.spans()
        at = time.perf_counter()
        for span in spans:
            track = self.tracks[span.handle]
            assert span.offset == len(track.ids), f"response {span.handle} has {len(track.ids)}, got {span.offset}"
            track.ids += span.ids.tolist()
            track.logprobs += span.logprobs.tolist()
            track.versions += [run.version for run in span.runs for _ in range(run.n)]
        self.arrivals.append(at)
        return at

    async def aclose(self) -> None:
        """Stop the engine."""
        await self.engine.close()

    def newest(self) -> list[int]:
        """Version of the newest token of each response; -1 without any."""
        return [track.versions[-1] if track.versions else -1 for track in self.tracks.values()]


async def fly(plan: Plan, flight: Flight) -> Outcome:
    """Switch the version under running responses as often as planned."""
    engine, outcome = flight.engine, Outcome()
    await engine.start(plan.config)
    await engine.load(Path(plan.directories[0]), 1)
    for handle, prompt in enumerate(plan.prompts):
        sampling = GREEDY if handle % 2 else SAMPLED
        flight.submit(handle, prompt, sampling, budget=CONTEXT - len(prompt))
    for version in range(2, plan.switches + 2):
        await _switch(plan, flight, outcome, version)
        if version == 2:
            for number, prompt in enumerate(plan.probes):
                flight.submit(len(plan.prompts) + number, prompt, GREEDY, budget=1)
    running = [flight.tracks[handle] for handle in range(len(plan.prompts))]
    outcome.aborted = sum(track.versions[-1] != plan.switches + 1 for track in running)
    engine.pause()
    try:
        while True:
            async with asyncio.timeout(_QUIET_S):
                await flight.take()
    except TimeoutError:
        pass  # nothing more comes
    outcome.thrown_away = engine.stats().generated_tokens - sum(len(track.ids) for track in flight.tracks.values())
    outcome.responses = running
    return outcome


async def _switch(plan: Plan, flight: Flight, outcome: Outcome, version: int) -> None:
    """Let every response get some tokens, then switch; put into `outcome` what that took."""
    running = [flight.tracks[handle] for handle in range(len(plan.prompts))]
    enough = [len(track.ids) + plan.tokens for track in running]
    flight.arrivals.clear()
    while any(len(track.ids) < least for track, least in zip(running, enough, strict=True)):
        await flight.take()
    # The first ones are the prefill's.
    gaps = np.diff(flight.arrivals[-plan.tokens :]).tolist()
    load = asyncio.create_task(_load(flight.engine, Path(plan.directories[(version - 1) % 2]), version))
    last, first = flight.arrivals[-1], None
    while min(flight.newest()[: len(running)]) < version:
        prefix = sum(len(track.prompt) + len(track.ids) for track in running)
        at = await flight.take()
        if first is None:
            if max(flight.newest()) < version:
                last = at
            else:
                first = at
                outcome.prefixes.append(prefix)
    assert first is not None
    outcome.loads.append(await load)
    step = statistics.median(gaps)
    outcome.steps.append(step)
    outcome.pauses.append(max(0.0, first - last - step))
    outcome.settled.append(max(0.0, flight.arrivals[-1] - last - step))


async def _load(engine: Engine, directory: Path, version: int) -> float:
    """Load a version; return how long the call took."""
    started = time.perf_counter()
    await engine.load(directory, version)
    return time.perf_counter() - started


async def compare(plan: Plan, before: Flight, fresh: Flight, outcome: Outcome) -> None:
    """Ask a fresh engine of the second version for the tokens that came first after the first switch."""
    await fresh.engine.start(plan.config)
    await fresh.engine.load(Path(plan.directories[1]), 2)
    greedy = [handle for handle in range(len(plan.prompts)) if before.tracks[handle].greedy]
    cuts = {handle: before.tracks[handle].versions.index(2) for handle in greedy}
    for handle, cut in cuts.items():
        track = before.tracks[handle]
        fresh.submit(handle, track.prompt, GREEDY, budget=cut + 1, prefix=track.ids[:cut])
    probes = range(len(plan.prompts), len(plan.prompts) + len(plan.probes))
    for handle in probes:
        fresh.submit(handle, before.tracks[handle].prompt, GREEDY, budget=1)
    while any(not track.logprobs for track in fresh.tracks.values()):
        await fresh.take()
    outcome.running = [(before.tracks[at].logprobs[cut], fresh.tracks[at].logprobs[0]) for at, cut in cuts.items()]
    outcome.probes = [(before.tracks[at].logprobs[0], fresh.tracks[at].logprobs[0]) for at in probes]


async def main(path: Path) -> None:
    """Do what the plan says, and print the outcome."""
    plan = Plan.load(path)
    async with aclosing(Flight(plan)) as before:
        outcome = await fly(plan, before)
    async with aclosing(Flight(plan)) as fresh:
        await compare(plan, before, fresh, outcome)
    print(json.dumps(asdict(outcome)), flush=True)


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
