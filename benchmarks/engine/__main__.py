"""Tokens per second of our engines beside Hugging Face `generate` and bare vLLM, and how exact their log-probabilities are.

    python -m benchmarks.engine [--rounds 5] [--quick] [--threads 1] [--wall] [--vllm-python PATH]

SmolLM2-135M, its weights bfloat16. Lanes take turns on the same work, so a ratio is of one minute; work of equal lengths at
batch 1, 8 and 32, and of lognormal lengths (sigma 1), which an engine that fills a place as soon as it is free does better
than one that waits for the longest. Hugging Face computes in whichever dtype is faster here at that batch.

With one thread, time is processor time of this process, which other processes change little; with `--wall` or more threads,
and beside vLLM, whose processes are its own, it is time on the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from rlharvest_rollout.engines.torch.engine import TorchEngine

from benchmarks.command import run as command
from benchmarks.engine.ours import EngineLane
from benchmarks.engine.reference import HuggingFace
from benchmarks.engine.vllm import ROOT, Child
from benchmarks.engine.work import Made, Work, equal, lognormal
from benchmarks.report import MEASUREMENTS, Report
from benchmarks.smollm2 import smollm2

BATCHES = (1, 8, 32)
LENGTH = 24
"""Tokens of a response where all are as long."""
GAP_BATCH, GAP_LENGTH = 6, 24
TEMPERATURES = (1.0, 0.6)
VLLM_PYTHON = ROOT / ".venv-vllm/bin/python"

OVER_HF, OVER_HF_LOGNORMAL, INVARIANT = 1.15, 2.0, 0.5
TORCH_OF_VLLM, WORKER_OF_VLLM = 0.7, 0.97
GAP_FLOAT32, GAP_BFLOAT16 = 1e-4, 1.2

Generate = Callable[[Work], Awaitable[Made]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What is measured, and how."""

    rounds: int
    batches: tuple[int, ...]
    threads: int
    clock: Callable[[], float]
    model: Path | None
    vllm: Path | None
    """Python of an environment with vLLM; None: it is not measured."""
    asked: bool
    """vLLM was asked for, so that its bars count even if it does not start."""


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status says whether every bar is met."""
    parser = argparse.ArgumentParser(description="Our engines against Hugging Face and vLLM.")
    parser.add_argument("--rounds", type=int, default=MEASUREMENTS, help="measurements of each figure")
    parser.add_argument("--quick", action="store_true", help="batch 8 alone")
    parser.add_argument("--threads", type=int, default=1, help="compute threads of every engine")
    parser.add_argument("--wall", action="store_true", help="measure time on the wall, on a machine that is quiet")
    parser.add_argument("--model", type=Path, help="a directory with SmolLM2; it is made if none is given")
    parser.add_argument("--vllm-python", type=Path, help=f"Python of vLLM's environment; {VLLM_PYTHON.parent.parent}")
    asked = parser.parse_args(arguments)
    python = asked.vllm_python or (VLLM_PYTHON if VLLM_PYTHON.exists() else None)
    plan = Plan(
        rounds=asked.rounds,
        batches=(8,) if asked.quick else BATCHES,
        threads=asked.threads,
        clock=time.perf_counter if asked.wall or asked.threads > 1 else time.process_time,
        model=asked.model,
        vllm=python,
        asked=asked.vllm_python is not None,
    )
    return command("engine", functools.partial(_measure, plan=plan), functools.partial(_bars, plan=plan))


def _measure(report: Report, _: Path, *, plan: Plan) -> None:
    torch.set_num_threads(plan.threads)
    asyncio.run(_all(report, plan.model or smollm2(), plan))


async def _all(report: Report, model: Path, plan: Plan) -> None:
    reference = HuggingFace(model, plan.clock)
    for batch in plan.batches:
        await _against_hugging_face(report, model, reference, batch, plan)
    await _gaps(report, model, reference, plan)
    if plan.vllm is not None:
        try:
            await _against_vllm(report, model, reference, plan)
        except (RuntimeError, TimeoutError, OSError) as error:
            say(f"vLLM could not be measured: {error!r}")


async def _against_hugging_face(report: Report, model: Path, reference: HuggingFace, batch: int, plan: Plan) -> None:
    async with AsyncExitStack() as stack:
        fast = await _torch(stack, plan).open(model, slots=batch)
        invariant = await _torch(stack, plan).open(model, slots=batch, invariant=True)
        int8 = await _torch(stack, plan).open(model, slots=batch, options={"weights": "int8"})
        dtype = reference.faster(batch)

        async def hugging_face(work: Work) -> Made:
            return reference.generate(work, dtype)

        lanes: dict[str, Generate] = {
            "hf": hugging_face,
            "fast": fast.generate,
            "invariant": invariant.generate,
            "int8": int8.generate,
        }
        rates = await _turns(lanes, functools.partial(equal, batch, LENGTH), plan.rounds)
        report.median(f"fast_of_hf_{batch}", "x", _ratios(rates, "fast", "hf"))
        report.median(f"invariant_of_fast_{batch}", "x", _ratios(rates, "invariant", "fast"))
        report.median(f"int8_of_fast_{batch}", "x", _ratios(rates, "int8", "fast"))
        for name in lanes:
            report.median(f"{name}_{batch}", "tokens/s", rates[name])
        say(f"batch {batch}, equal lengths: {_shown(rates)}; Hugging Face in {dtype}")
        if batch > 1:
            rates = await _turns(
                {"hf": hugging_face, "fast": fast.generate}, functools.partial(lognormal, batch), plan.rounds
            )
            report.median(f"fast_of_hf_lognormal_{batch}", "x", _ratios(rates, "fast", "hf"))
            say(f"batch {batch}, lognormal lengths: {_shown(rates)}")


async def _against_vllm(report: Report, model: Path, reference: HuggingFace, plan: Plan) -> None:
    assert plan.vllm is not None
    async with AsyncExitStack() as stack:
        say("starting vLLM twice, bare and as the worker's engine")
        bare = await stack.enter_async_context(Child(plan.vllm, model, plan.threads, "bare"))
        worker = await stack.enter_async_context(Child(plan.vllm, model, plan.threads, "worker"))
        for batch in plan.batches:
            async with AsyncExitStack() as inner:
                ours = await _torch(inner, plan, time.perf_counter).open(model, slots=batch)
                lanes: dict[str, Generate] = {
                    "vllm": bare.generate,
                    "vllm_worker": worker.generate,
                    "torch": ours.generate,
                }
                rates = await _turns(lanes, functools.partial(equal, batch, LENGTH), plan.rounds)
            report.median(f"torch_of_vllm_{batch}", "x", _ratios(rates, "torch", "vllm"))
            report.median(f"worker_of_vllm_{batch}", "x", _ratios(rates, "vllm_worker", "vllm"))
            report.median(f"vllm_{batch}", "tokens/s", rates["vllm"])
            say(f"batch {batch} beside vLLM: {_shown(rates)}")
        for temperature in TEMPERATURES:
            await _gap(report, "vllm_bf16", worker.generate, reference, temperature)


async def _gaps(report: Report, model: Path, reference: HuggingFace, plan: Plan) -> None:
    """Compare the log-probabilities of rollout with the trainer's."""
    kinds: dict[str, dict[str, Any]] = {
        "fp32": {"dtype": "float32"},
        "bf16": {},
        "bf16_invariant": {"invariant": True},
        "int8": {"options": {"weights": "int8"}},
    }
    for name, settings in kinds.items():
        async with AsyncExitStack() as stack:
            lane = await _torch(stack, plan).open(model, slots=GAP_BATCH, **settings)
            for temperature in TEMPERATURES:
                await _gap(report, name, lane.generate, reference, temperature)


async def _gap(report: Report, name: str, generate: Generate, reference: HuggingFace, temperature: float) -> None:
    work = equal(GAP_BATCH, GAP_LENGTH, 1, temperature)
    made = await generate(work)
    rollout = torch.tensor([value for row in made.logprobs for value in row])
    exact = reference.logprobs(work, made, "float32")
    label = f"gap_{name}_{_temperature(temperature)}"
    if name == "fp32":
        report.count(label, "µnats", 1e6 * _mean(rollout, exact))
    else:
        rounded = reference.logprobs(work, made, "bfloat16")
        report.count(label, "nats", _mean(rollout, rounded))
        report.count(f"{label}_of_hf", "x", _mean(rollout, rounded) / _mean(rounded, exact))
    say(f"{label}: {report.figures[label].value:.4f} {report.figures[label].unit}")


async def _turns(lanes: dict[str, Generate], work: Callable[[int], Work], rounds: int) -> dict[str, list[float]]:
    """Let all lanes do the same work, one after the other, after a round that is not measured; return their rates."""
    rates: dict[str, list[float]] = {name: [] for name in lanes}
    for turn in range(rounds + 1):
        for name, generate in lanes.items():
            made = await generate(work(turn))
            if turn:
                rates[name].append(made.rate)
    return rates


def _torch(stack: AsyncExitStack, plan: Plan, clock: Callable[[], float] | None = None) -> EngineLane:
    engine = TorchEngine(threads=plan.threads, slots=max(BATCHES), kv_memory_bytes=1 << 29, device="cpu")
    lane = EngineLane(engine, clock or plan.clock)
    stack.push_async_callback(lane.close)
    return lane


def _bars(report: Report, *, plan: Plan) -> None:
    for batch in plan.batches:
        if batch > 1:
            report.least(f"fast_of_hf_{batch}", OVER_HF, "of Hugging Face")
            report.least(f"fast_of_hf_lognormal_{batch}", OVER_HF_LOGNORMAL, "of Hugging Face")
        if batch == max(BATCHES):
            report.least(f"invariant_of_fast_{batch}", INVARIANT, "of fast")
        if plan.vllm is not None and (plan.asked or f"vllm_{batch}" in report.figures):
            report.least(f"torch_of_vllm_{batch}", TORCH_OF_VLLM, "of bare vLLM, eager")
            report.least(f"worker_of_vllm_{batch}", WORKER_OF_VLLM, "of bare vLLM, eager")
    engines: tuple[Literal["bf16", "bf16_invariant", "vllm_bf16"], ...] = ("bf16", "bf16_invariant", "vllm_bf16")
    for temperature in TEMPERATURES:
        report.bar(f"gap_fp32_{_temperature(temperature)}", 1e6 * GAP_FLOAT32, "mean difference to the trainer")
        for name in engines:
            label = f"gap_{name}_{_temperature(temperature)}_of_hf"
            if name != "vllm_bf16" or plan.asked or label in report.figures:
                report.bar(label, GAP_BFLOAT16, "of Hugging Face's own, bfloat16 to float32")
    if plan.vllm is None:
        say("vLLM: not measured; --vllm-python gives an environment that has it")


def _ratios(rates: dict[str, list[float]], ours: str, other: str) -> list[float]:
    return [a / b for a, b in zip(rates[ours], rates[other], strict=True)]


def _mean(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a.double() - b.double()).abs().mean())


def _temperature(temperature: float) -> str:
    return f"t{temperature:g}".replace(".", "_")


def _shown(rates: dict[str, list[float]]) -> str:
    return ", ".join(f"{name} {sorted(values)[len(values) // 2]:.0f}" for name, values in rates.items()) + " tokens/s"


def say(text: str) -> None:
    """Tell whoever waits how far it is."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
