"""What a new version costs the responses that run: `python -m benchmarks.inflight`.

An engine in a process of its own has 16 responses of SmolLM2 in flight, and gets a new version five times; the two versions
are four AdamW steps apart and take turns. Their files are in the page cache. Once with `rollout.kv: keep`, once with
`recompute`; the torch engine, and vLLM where `--vllm-python` names a Python that has it.

How each figure is found:

- Pause: from the last token of the old version to the first of the new one, less the median time between two tokens.
- Recompute per thousand: from that token until every response has one of the new version, less the median step and less what
  the same takes with `keep`, for each thousand tokens of prompts and responses in flight.
- Mismatch: mean |difference| of the log-probabilities of the tokens that the second version sampled in running responses
  from those of Hugging Face under that version in float32, which is what a trainer would see. How far the two versions are
  apart on the same tokens is beside it.
- First token of new requests, of running ones: largest |difference| of the log-probability of the first token after the
  switch from that of a fresh engine of the new version; greedy, so that both sample the same token.
- Aborted, thrown away: responses that did not go on; tokens that the engine sampled and did not hand over.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from rlharvest.engine import Kv

from benchmarks import command
from benchmarks.inflight import versions
from benchmarks.inflight.flight import Plan
from benchmarks.report import MEASUREMENTS, Report
from benchmarks.smollm2 import DEFAULT, smollm2

RESPONSES, PROBES = 16, 4
PROMPT = 64
"""Tokens of a prompt."""
TOKENS = 32
"""Tokens of each response between two switches."""
PAUSE_BAR_S = 0.3
FIRST_BAR = 1e-3
MILLION = 1e6
"""Differences are printed in millionths."""
MODES: tuple[Kv, ...] = ("keep", "recompute")


def fly(python: str, plan: Plan, directory: Path) -> dict[str, Any]:
    """Return what a plan came to in a process of its own."""
    path = plan.save(directory / f"{plan.engine}.{plan.kv}.json")
    environment = {
        **os.environ,
        "RLHARVEST_SLOTS": str(RESPONSES + PROBES),
        "RLHARVEST_KV_MEMORY_MB": "1280",
        "RLHARVEST_LOG_LEVEL": "warning",
    }
    run = [python, "-m", "benchmarks.inflight.flight", os.fspath(path)]
    found = subprocess.run(run, env=environment, check=True, stdout=subprocess.PIPE)
    outcome: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return outcome


def measure(report: Report, directory: Path, *, pythons: dict[str, str], model: Path, length: int) -> None:
    """Measure each engine in each mode."""
    paths = versions.two_versions(smollm2(model), directory)
    prompts = versions.tokens(paths[0], RESPONSES + PROBES - 1, PROMPT)
    references = [versions.Reference(path) for path in paths]
    for engine, python in pythons.items():
        settled: dict[Kv, list[float]] = {}
        for kv in MODES:
            plan = Plan(
                engine=engine,  # type: ignore[arg-type]  # one of the two
                kv=kv,
                directories=(os.fspath(paths[0]), os.fspath(paths[1])),
                prompts=prompts[:RESPONSES],
                # One of them is a prompt that the old version has prefilled.
                probes=[prompts[0], *prompts[RESPONSES:]],
                switches=MEASUREMENTS,
                tokens=length,
            )
            for path in paths:
                (path / "model.safetensors").read_bytes()
            outcome = fly(python, plan, directory)
            settled[kv] = outcome["settled"]
            _report(report, f"{engine}_{kv}", outcome, references)
            if kv == "recompute":
                ordinary = statistics.median(settled["keep"])
                pairs = zip(outcome["settled"], outcome["prefixes"], strict=True)
                per_thousand = [1000 * max(0.0, seconds - ordinary) / prefix for seconds, prefix in pairs]
                report.median(f"{engine}_recompute_per_thousand", "s", per_thousand)
            say(f"{engine} {kv}: pause {statistics.median(outcome['pauses']):.3f} s")


def _report(report: Report, name: str, outcome: dict[str, Any], references: list[versions.Reference]) -> None:
    report.median(f"{name}_pause", "s", outcome["pauses"])
    report.median(f"{name}_step", "s", outcome["steps"])
    report.median(f"{name}_load", "s", outcome["loads"])
    old, new = references
    off, apart = [], []
    for track in outcome["responses"]:
        cut, end = track["versions"].index(2), track["versions"].index(3)
        if track["greedy"] or cut == end:
            continue
        ids = track["ids"][:end]
        before, after = (reference.logprobs(track["prompt"], ids)[cut:] for reference in (old, new))
        off += [abs(one - other) for one, other in zip(track["logprobs"][cut:end], after, strict=True)]
        apart += [abs(one - other) for one, other in zip(before, after, strict=True)]
    report.count(f"{name}_mismatch", "1e-6", MILLION * statistics.fmean(off))
    report.count(f"{name}_versions_apart", "1e-6", MILLION * statistics.fmean(apart))
    report.count(f"{name}_new_first", "1e-6", MILLION * max(abs(one - other) for one, other in outcome["probes"]))
    report.count(f"{name}_running_first", "1e-6", MILLION * max(abs(one - other) for one, other in outcome["running"]))
    report.count(f"{name}_aborted", "responses", outcome["aborted"])
    report.count(f"{name}_thrown_away", "tokens", outcome["thrown_away"])


def bars(report: Report, *, engines: list[str]) -> None:
    """Say what the figures must be."""
    for engine in engines:
        report.bar(f"{engine}_keep_pause", PAUSE_BAR_S, "weights staged beforehand")
        report.bar(f"{engine}_recompute_running_first", MILLION * FIRST_BAR, "of a fresh engine's")
        for kv in MODES:
            report.bar(f"{engine}_{kv}_new_first", MILLION * FIRST_BAR, "of a fresh engine's")
            report.none(f"{engine}_{kv}_aborted", f"{engine}_{kv}_thrown_away")


def say(text: str) -> None:
    """Show progress."""
    print(text, flush=True)


def main() -> int:
    """Measure, print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm-python", help="a Python that has vLLM; without it torch alone is measured")
    parser.add_argument("--only", choices=("torch", "vllm"), help="one engine")
    parser.add_argument("--model", type=Path, default=DEFAULT, help="Hugging Face directory (%(default)s)")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="between two switches (%(default)d)")
    asked = parser.parse_args()
    pythons = {"torch": sys.executable, **({"vllm": asked.vllm_python} if asked.vllm_python else {})}
    pythons = {engine: python for engine, python in pythons.items() if asked.only in (None, engine)}
    if not pythons:
        parser.error("--only vllm needs --vllm-python")
    run = partial(measure, pythons=pythons, model=asked.model, length=asked.tokens)
    return command.run("inflight", run, partial(bars, engines=list(pythons)))


if __name__ == "__main__":
    sys.exit(main())
