"""Tokens per second with drafts from history over those without, in a real second epoch.

    python -m benchmarks.histospec [--rounds 7] [--wall]

A first epoch is sampled without drafts; policy-gradient steps on it move the policy; the second epoch goes through the same
prompts with the first one's responses as history. Each figure is the ratio of two engines, drafts `auto` and `off`, both in
the mode that is faster without drafts, which take turns on the same prompts. Beside it: the share of drafted tokens that was
accepted, and the mean length of a draft. The policy is a small one (see policy.py) that learns until SKILLED of what is
drafted is accepted, and an earlier state of it, of which little is.

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
from pathlib import Path

import numpy as np
import torch
from rlharvest.engine import Sampling
from rlharvest.speculation.history import DraftSource, PastResponse

from benchmarks.command import run as command
from benchmarks.histospec import policy
from benchmarks.histospec.epoch import Epoch, Lane, Result
from benchmarks.report import Report

TEMPERATURES = (1.0, 0.6, 0.0)
BATCHES = {1: 1, 4: 2, 32: 8}
"""Prompts of a round for each size of batch."""
ROUNDS = 7
SAMPLES = 4
WARM_UP = 360
"""Steps that are not measured, about: in them the switch finds out what drafts are good for."""

EARLY, SKILLED = 0.2, 0.7
"""Acceptance from which a policy counts as one of little, and one of much skill."""
CHUNK = 16
"""Optimizer steps between two looks at the acceptance."""
CHUNKS_MOST = 20

PAYS_FROM = 0.6
"""Acceptance from which drafts must pay at small batches."""
GAIN, LOSS = 1.4, 0.97

Clock = Callable[[], float]


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status says whether every bar is met."""
    parser = argparse.ArgumentParser(description="Drafts from history against none.")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="measurements of each figure")
    parser.add_argument("--wall", action="store_true", help="measure time on the wall, on a machine that is quiet")
    asked = parser.parse_args(arguments)
    clock = time.perf_counter if asked.wall else time.process_time
    return command("histospec", functools.partial(_measure, rounds=asked.rounds, clock=clock), _bars)


def _measure(report: Report, directory: Path, *, rounds: int, clock: Clock) -> None:
    torch.set_num_threads(1)
    asyncio.run(_epochs(report, directory, rounds, clock))


async def _epochs(report: Report, directory: Path, rounds: int, clock: Clock) -> None:
    prompts = max(_warm_up(batch) + rounds for batch in BATCHES) * max(BATCHES.values())
    early, skilled = await _policies(directory, clock)
    for first, label, temperatures in ((skilled, "", TEMPERATURES), (early, "early_", TEMPERATURES[:1])):
        for temperature in temperatures:
            past = await _first_epoch(first, temperature, range(prompts), clock)
            second = policy.moved(first, directory / f"{label}second-{temperature}", _samples(past))
            epoch = _epoch(temperature, seed=1, past=past)
            for batch in BATCHES:
                await _compare(report, f"{label}{_name(temperature, batch)}", second, epoch, batch, rounds, clock)


async def _policies(directory: Path, clock: Clock) -> tuple[Path, Path]:
    """Train one policy; return an early state of it, and the one that is skilled enough."""
    student, early = policy.Student(), None
    for _ in range(CHUNKS_MOST):
        student.learn(CHUNK)
        state = student.save(directory / f"first-{student.steps}")
        past = await _first_epoch(state, 1.0, range(4), clock)
        async with AsyncExitStack() as stack:
            lane = await _lane(stack, _epoch(1.0, seed=1, past=past), clock).open(state, batch=16, drafts="on")
            share = (await lane.generate(range(4))).acceptance
        say(f"{student.steps} steps: {share:.2f} of what is drafted is accepted")
        if early is None and share >= EARLY:
            early = state
        if share >= SKILLED:
            return early or state, state
    raise RuntimeError(f"after {student.steps} steps the policy is not skilled enough")


async def _compare(report: Report, name: str, model: Path, epoch: Epoch, batch: int, rounds: int, clock: Clock) -> None:
    """Let engines with drafts and without take turns; report how much faster those with are."""
    size, warm_up = BATCHES[batch], _warm_up(batch)
    parts = [range(part * size, (part + 1) * size) for part in range(warm_up + rounds)]
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
        f"{report.figures[f'{name}_draft'].value or 0:.1f} a draft, reward {_reward(r for _, r in pairs):.2f}"
    )


def _warm_up(batch: int) -> int:
    """Return the rounds that are not measured."""
    return -(-WARM_UP * batch // (BATCHES[batch] * SAMPLES * policy.LENGTH))


def _lane(stack: AsyncExitStack, epoch: Epoch, clock: Clock) -> Lane:
    lane = Lane(epoch, clock)
    stack.push_async_callback(lane.close)
    return lane


def _epoch(temperature: float, *, seed: int, past: Result | None) -> Epoch:
    """Return an epoch over all prompts, with what is known of each."""
    history = {
        number: DraftSource(
            responses=tuple(
                PastResponse(
                    ids=np.array(ids, np.uint32), epoch=0, version=0, reward=policy.reward_of(_start(number), ids)
                )
                for ids in group
            )
        )
        for number, group in (past.responses if past is not None else {}).items()
    }
    return Epoch(
        prompts={number: policy.prompt_of(_start(number)) for number in range(900)},
        samples=SAMPLES,
        budget=policy.LENGTH,
        sampling=Sampling(temperature=temperature, eos_ids=frozenset({policy.EOS}), vocab=policy.EOS + 1),
        seed=seed,
        history=history,
    )


async def _first_epoch(model: Path, temperature: float, numbers: Iterable[int], clock: Clock) -> Result:
    async with AsyncExitStack() as stack:
        lane = await _lane(stack, _epoch(temperature, seed=0, past=None), clock).open(model, batch=32, drafts="off")
        return await lane.generate(numbers)


def _start(number: int) -> int:
    return (31 * number + 7) % 900


def _samples(result: Result) -> list[tuple[list[int], list[int], float]]:
    return [
        (policy.prompt_of(_start(number)), ids, policy.reward_of(_start(number), ids))
        for number, group in result.responses.items()
        for ids in group
    ]


def _reward(results: Iterable[Result]) -> float:
    rewards = [reward for result in results for _, _, reward in _samples(result)]
    return sum(rewards) / len(rewards)


def _name(temperature: float, batch: int) -> str:
    return f"t{temperature:g}_batch{batch}".replace(".", "_")


def _bars(report: Report) -> None:
    names = [(_name(temperature, batch), batch) for temperature in TEMPERATURES for batch in BATCHES]
    names += [(f"early_{_name(TEMPERATURES[0], batch)}", batch) for batch in BATCHES]
    for name, batch in names:
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
