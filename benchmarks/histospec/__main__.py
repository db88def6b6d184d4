"""Tokens per second with drafts from history over those without, in a real second epoch.

    python -m benchmarks.histospec [--model demo|smollm2] [--rounds 7] [--wall] [--quick]

A first epoch is sampled without drafts; policy-gradient steps on it move the policy; the second epoch goes through the same
prompts with the first one's responses as history. Each figure is the ratio of two engines, drafts `auto` and `off`, both in
the mode that is faster without drafts, which take turns on the same prompts. Beside it: the share of drafted tokens that was
accepted, and the mean length of a draft. The demo's policy is a small one (policy) that learns until SKILLED of what is
drafted is accepted, and an earlier state of it, of which little is; SmolLM2 is asked for sums as it is (sums).

Time is that of the process on its processors: one thread computes and nothing waits, so on a quiet machine it is the time
on the wall, and other processes change it little.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rlharvest.engine import Sampling
from rlharvest.speculation.history import DraftSource, PastResponse

from benchmarks.command import run as command
from benchmarks.histospec.epoch import Epoch, Lane, Result
from benchmarks.histospec.policy import Student, counting, moved
from benchmarks.histospec.sums import sums
from benchmarks.histospec.task import Task
from benchmarks.report import Report
from benchmarks.smollm2 import smollm2

TEMPERATURES = (1.0, 0.6, 0.0)
ROUNDS = {"demo": 7, "smollm2": 5}
QUICK_BATCHES = (1, 4)

EARLY, SKILLED = 0.2, 0.7
"""Acceptance from which a policy counts as one of little, and one of much skill."""
CHUNK = 16
"""Optimizer steps between two looks at the acceptance."""
CHUNKS_MOST = 20

PAYS_FROM = 0.6
"""Acceptance from which drafts must pay at small batches."""
GAIN, LOSS = 1.4, 0.97

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scope:
    """What of it is measured."""

    model: str
    rounds: int
    """Measurements of each figure."""
    quick: bool
    clock: Clock

    @property
    def temperatures(self) -> tuple[float, ...]:
        return TEMPERATURES[:1] if self.quick else TEMPERATURES

    def batches(self, task: Task) -> list[int]:
        return [batch for batch in task.batches if not self.quick or batch in QUICK_BATCHES]


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status says whether every bar is met."""
    parser = argparse.ArgumentParser(description="Drafts from history against none.")
    parser.add_argument("--model", choices=tuple(ROUNDS), default="demo", help="whose responses (%(default)s)")
    parser.add_argument("--rounds", type=int, help="measurements of each figure")
    parser.add_argument("--wall", action="store_true", help="measure time on the wall, on a machine that is quiet")
    parser.add_argument("--quick", action="store_true", help="temperature 1 and small batches alone")
    asked = parser.parse_args(arguments)
    scope = Scope(
        model=asked.model,
        rounds=asked.rounds or ROUNDS[asked.model],
        quick=asked.quick,
        clock=time.perf_counter if asked.wall else time.process_time,
    )
    names: dict[str, int] = {}
    return command(
        "histospec", functools.partial(_measure, scope=scope, names=names), functools.partial(_bars, names=names)
    )


def _measure(report: Report, directory: Path, *, scope: Scope, names: dict[str, int]) -> None:
    torch.set_num_threads(1)
    asyncio.run(_epochs(report, directory, scope, names))


async def _epochs(report: Report, directory: Path, scope: Scope, names: dict[str, int]) -> None:
    """Measure everything; put the names of the figures, with their sizes of batch, into `names` first."""
    model = smollm2() if scope.model == "smollm2" else None
    task = sums(model) if model is not None else counting()
    stages = [("", temperature) for temperature in scope.temperatures]
    if scope.model == "demo" and not scope.quick:
        stages.append(("early_", TEMPERATURES[0]))
    names |= {f"{label}{_name(t, batch)}": batch for label, t in stages for batch in scope.batches(task)}
    early, skilled = (model, model) if model is not None else await _policies(directory, task, scope.clock)
    prompts = max((task.rounds_of_warm_up(batch) + scope.rounds) * task.batches[batch] for batch in scope.batches(task))
    for label, temperature in stages:
        first = early if label else skilled
        past = await _first_epoch(first, task, temperature, range(prompts), scope.clock)
        samples = _samples(task, past)[: task.trained]
        second = moved(first, directory / f"{label}second-{temperature}", samples, rate=task.learning_rate)
        epoch = _epoch(task, temperature, seed=1, past=past)
        for batch in scope.batches(task):
            await _compare(report, f"{label}{_name(temperature, batch)}", second, task, epoch, batch, scope)


async def _policies(directory: Path, task: Task, clock: Clock) -> tuple[Path, Path]:
    """Train one policy; return an early state of it, and the one that is skilled enough."""
    student, early = Student(), None
    for _ in range(CHUNKS_MOST):
        student.learn(CHUNK)
        state = student.save(directory / f"first-{student.steps}")
        past = await _first_epoch(state, task, 1.0, range(4), clock)
        async with AsyncExitStack() as stack:
            lane = await _lane(stack, _epoch(task, 1.0, seed=1, past=past), clock).open(state, batch=16, drafts="on")
            share = (await lane.generate(range(4))).acceptance
        say(f"{student.steps} steps: {share:.2f} of what is drafted is accepted")
        if early is None and share >= EARLY:
            early = state
        if share >= SKILLED:
            return early or state, state
    raise RuntimeError(f"after {student.steps} steps the policy is not skilled enough")


async def _compare(report: Report, name: str, model: Path, task: Task, epoch: Epoch, batch: int, scope: Scope) -> None:
    """Let engines with drafts and without take turns; report how much faster those with are."""
    size, warm_up, clock = task.batches[batch], task.rounds_of_warm_up(batch), scope.clock
    parts = [range(part * size, (part + 1) * size) for part in range(warm_up + scope.rounds)]
    async with AsyncExitStack() as stack:
        modes = {}
        for invariant in (False, True):
            lane = await _lane(stack, epoch, clock).open(model, batch=batch, drafts="off", invariant=invariant)
            modes[invariant] = (await lane.generate(parts[0])).rate, lane
        invariant = modes[True][0] > modes[False][0]
        plain = modes[invariant][1]
        drafting = await _lane(stack, epoch, clock).open(model, batch=batch, drafts="auto", invariant=invariant)
        for part in parts[:warm_up]:
            await drafting.generate(part)
        pairs: list[tuple[Result, Result]] = []
        for turn, part in enumerate(parts[warm_up:]):
            if turn % 2:
                drafted = await drafting.generate(part)
                pairs.append((await plain.generate(part), drafted))
            else:
                without = await plain.generate(part)
                pairs.append((without, await drafting.generate(part)))
    report.median(name, "x", [drafted.rate / without.rate for without, drafted in pairs])
    report.median(f"{name}_accepted", "of drafted", [drafted.acceptance for _, drafted in pairs])
    report.median(f"{name}_draft", "tokens", [drafted.window for _, drafted in pairs])
    report.median(f"{name}_off", "tokens/s", [without.rate for without, _ in pairs])
    say(
        f"{name}: {report.figures[name].value or 0:.2f}x of {report.figures[f'{name}_off'].value or 0:.0f} tok/s "
        f"({'invariant' if invariant else 'fast'}), {report.figures[f'{name}_accepted'].value or 0:.2f} accepted of "
        f"{report.figures[f'{name}_draft'].value or 0:.1f} a draft, reward {_reward(task, (r for _, r in pairs)):.2f}"
    )


def _lane(stack: AsyncExitStack, epoch: Epoch, clock: Clock) -> Lane:
    lane = Lane(epoch, clock)
    stack.push_async_callback(lane.close)
    return lane


def _epoch(task: Task, temperature: float, *, seed: int, past: Result | None) -> Epoch:
    """Return an epoch over all prompts, with what is known of each."""
    history = {
        number: DraftSource(
            responses=tuple(
                PastResponse(ids=np.array(ids, np.uint32), epoch=0, version=0, reward=task.reward(number, ids))
                for ids in group
            )
        )
        for number, group in (past.responses if past is not None else {}).items()
    }
    return Epoch(
        prompts=task.prompts,
        samples=task.samples,
        budget=task.length,
        sampling=Sampling(temperature=temperature, eos_ids=frozenset({task.eos}), vocab=task.vocab),
        seed=seed,
        history=history,
    )


async def _first_epoch(model: Path, task: Task, temperature: float, numbers: Iterable[int], clock: Clock) -> Result:
    async with AsyncExitStack() as stack:
        lane = _lane(stack, _epoch(task, temperature, seed=0, past=None), clock)
        return await (await lane.open(model, batch=32, drafts="off")).generate(numbers)


def _samples(task: Task, result: Result) -> list[tuple[list[int], list[int], float]]:
    return [
        (task.prompts[number], ids, task.reward(number, ids))
        for number, group in result.responses.items()
        for ids in group
    ]


def _reward(task: Task, results: Iterable[Result]) -> float:
    rewards = [reward for result in results for _, _, reward in _samples(task, result)]
    return sum(rewards) / len(rewards)


def _name(temperature: float, batch: int) -> str:
    return f"t{temperature:g}_batch{batch}".replace(".", "_")


def _bars(report: Report, *, names: dict[str, int]) -> None:
    for name, batch in names.items():
        share = report.figures.get(f"{name}_accepted")
        accepted = (share.value or 0.0) if share is not None else 0.0
        if batch <= 4 and accepted >= PAYS_FROM:
            report.least(name, GAIN, f"where {PAYS_FROM:.0%} of drafted tokens are accepted")
        else:
            report.least(name, LOSS, "the switch keeps drafts from costing")


def say(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
