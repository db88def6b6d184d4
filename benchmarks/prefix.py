"""Prompts that need not be prefilled twice: `python -m benchmarks.prefix`.

A simulated fleet, in steps of decoding, whose responses are given out by the coordinator's own policy
(rlharvest.policies.dispatch), once with homes and once without: the same groups, lengths and kills. Each worker keeps the
prompts that it prefilled, the least recently used ones out first, until it is killed or its version changes, as the torch
engine does. A step of a worker takes longer the more responses it decodes, and what it prefills delays them.

How each figure is found, for a fleet that has more slots than responses, one that is full, and each with and without kills:

- Prompt tokens computed, saved: prefilled with homes; not computed since the worker had the prompt.
- Against none: prompt tokens computed with homes over those without.
- Time against none: steps until all responses are there, with homes over those without.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path

from rlharvest.policies import dispatch

from benchmarks import command
from benchmarks.report import MEASUREMENTS, Report

WORKERS, SLOTS = 8, 32
SAMPLES = 8
"""Responses of a group."""
GROUPS = 96
PROMPT, LENGTH, SIGMA = 400, 150, 1.0
"""Tokens of a prompt and median tokens of a response, lognormal with this sigma."""
KEPT = 32
"""Prompts that a worker keeps."""
PREFILL = 0.02
"""Steps that one token of a prefill takes."""
FULL = 0.5
"""A step of a worker with all slots taken takes so much longer than one with a single response."""
AWAY = 50
"""Steps until a worker that was killed is back."""
VERSION = 300
"""Steps between two versions."""
LOADS = {"loose": 8, "full": 48}
"""Groups at a time: a quarter of the slots, and one and a half times as many as there are."""
LIFE = 400.0
"""Mean steps that a worker lives between two kills."""


@dataclass(slots=True)
class Sample:
    """One response."""

    handle: int
    length: int
    done: float = 0.0


@dataclass(slots=True)
class Worker:
    """A simulated worker."""

    name: str
    held: list[Sample] = field(default_factory=list)
    prompts: OrderedDict[int, None] = field(default_factory=OrderedDict)
    back: int = 0
    """Step at which it is there again."""
    delay: float = 0.0
    """Steps of prefill that are still to be done."""

    def take(self, sample: Sample, prompt: int) -> int:
        """Start or continue a response; return the tokens of its prompt that must be computed."""
        group = sample.handle // SAMPLES
        known = group in self.prompts
        self.prompts[group] = None
        self.prompts.move_to_end(group)
        if len(self.prompts) > KEPT:
            self.prompts.popitem(last=False)
        computed = 0 if known else prompt
        self.delay += PREFILL * (computed + int(sample.done))
        self.held.append(sample)
        return computed

    def step(self) -> list[Sample]:
        """Decode for the time of a step; return what ended."""
        spent = min(self.delay, 1.0)
        self.delay -= spent
        for sample in self.held:
            sample.done += (1.0 - spent) / (1 + FULL * len(self.held) / SLOTS)
        ended = [sample for sample in self.held if sample.done >= sample.length]
        self.held = [sample for sample in self.held if sample.done < sample.length]
        return ended


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run took."""

    computed: int
    saved: int
    steps: int


def run(seed: int, *, at_a_time: int, life: float, homes: bool) -> Outcome:
    """Return what it takes to sample all groups.

    Args:
        at_a_time: groups that are live at most.
        life: mean steps between two kills of a worker; 0: none.
        homes: whether responses go where their prompt is.
    """
    chance, kills = random.Random(seed), random.Random(seed + 1)
    prompts = [int(chance.lognormvariate(0, 0.5) * PROMPT) for _ in range(GROUPS)]
    fresh = (
        [Sample(group * SAMPLES + place, 1 + int(chance.lognormvariate(0, SIGMA) * LENGTH)) for place in range(SAMPLES)]
        for group in range(GROUPS)
    )
    workers = {f"w{number}": Worker(f"w{number}") for number in range(WORKERS)}
    waiting: list[Sample] = []
    left: dict[int, int] = {}
    computed = saved = steps = 0
    more = True
    while more or left:
        for group in islice(fresh, at_a_time - len(left)):
            left[group[0].handle // SAMPLES] = SAMPLES
            waiting += group
        more = len(left) == at_a_time
        for sample, worker in _given(waiting, workers, steps, homes=homes):
            prompt = prompts[sample.handle // SAMPLES]
            tokens = worker.take(sample, prompt)
            computed, saved = computed + tokens, saved + prompt - tokens
        steps += 1
        for worker in workers.values():
            if life and kills.random() < 1 / life:
                waiting += worker.held
                workers[worker.name] = Worker(worker.name, back=steps + AWAY)
                continue
            if steps % VERSION == 0:
                worker.prompts.clear()
            for sample in worker.step():
                ordinal = sample.handle // SAMPLES
                left[ordinal] -= 1
                if not left[ordinal]:
                    del left[ordinal]
    return Outcome(computed, saved, steps)


def _given(waiting: list[Sample], workers: dict[str, Worker], now: int, *, homes: bool) -> list[tuple[Sample, Worker]]:
    """Take what is given to a worker out of `waiting`, and return it."""
    if not waiting:
        return []
    by_handle = {
        sample.handle: sample for sample in sorted(waiting, key=lambda one: (one.handle // SAMPLES, -one.done))
    }
    asked = [dispatch.Waiting(handle=handle, prompt=handle // SAMPLES if homes else None) for handle in by_handle]
    candidates = [
        dispatch.Candidate(worker=one.name, slots=SLOTS, held=len(one.held), step=0, version=0)
        for one in workers.values()
        if one.back <= now
    ]
    known: dict[int, set[str]] = {}
    for one in workers.values():
        for sample in one.held:
            known.setdefault(sample.handle // SAMPLES, set()).add(one.name)
    pairs = [(by_handle.pop(handle), workers[name]) for handle, name in dispatch.assign(asked, candidates, known)]
    waiting[:] = by_handle.values()
    return pairs


def measure(report: Report, _: Path, *, repeat: int) -> None:
    """Run everything, each seed with homes and without."""
    for load, at_a_time in LOADS.items():
        for kills, life in (("", 0.0), ("_kills", LIFE)):
            pairs = []
            for seed in range(repeat):
                pair = [run(seed, at_a_time=at_a_time, life=life, homes=homes) for homes in (True, False)]
                pairs.append((pair[0], pair[1]))
            name = f"{load}{kills}"
            report.median(f"{name}_computed", "tokens", [ours.computed for ours, _ in pairs])
            report.median(f"{name}_saved", "tokens", [ours.saved for ours, _ in pairs])
            report.median(f"{name}_against_none", "x", [ours.computed / none.computed for ours, none in pairs])
            report.median(f"{name}_time_against_none", "x", [ours.steps / none.steps for ours, none in pairs])
            say(f"{name}: {statistics.median(ours.computed / none.computed for ours, none in pairs):.2f}x computed")


def bars(report: Report) -> None:
    """Say what the figures must be."""
    for load in LOADS:
        for kills, most in (("", 0.4), ("_kills", 0.6)):
            report.bar(f"{load}{kills}_against_none", most, "of the prompt tokens without homes")
            report.bar(f"{load}{kills}_time_against_none", 1.01, "homes cost no time")


def say(text: str) -> None:
    """Show progress."""
    print(text, flush=True)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=MEASUREMENTS, help="seeds (%(default)d)")
    return command.run("prefix", partial(measure, repeat=parser.parse_args().repeat), bars)


if __name__ == "__main__":
    sys.exit(main())
