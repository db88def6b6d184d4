"""How fast a placement is found, and what the planner makes of AReaL-Hex's machines: `python -m benchmarks.planner`.

Bars: under 10 s for 56 GPUs of two kinds, under 60 s for 1,000 GPUs of six kinds, both for the dearest of the models.

Reported, and not gating, are AReaL-Hex's own figures (arXiv 2511.00796, tables 1 and 4): mixed machines against H800s alone
for the same money, and the price of mixed machines that are as fast as 24 H800s. The planner is given that paper's machines,
prices, links, model shapes and manner of transfer (whole weights, rollout waits); two efficiencies of the H20 are fitted to
its table 1, everything else is a prediction. The paper does not say how long responses are, so each figure is a median over
means from 3,000 to 12,000 tokens, with its least and most. The same is given with differences that travel meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

from rlharvest.jobs.model import parse
from rlharvest.planner import inventory, solve, workload
from rlharvest.planner.inventory import Inventory
from rlharvest.planner.plan import Plan
from rlharvest.planner.solve import Options

from benchmarks import command
from benchmarks.report import MEASUREMENTS, Report

MEANS = (3_000.0, 5_000.0, 7_000.0, 9_000.0, 12_000.0)
"""Tokens of a response."""

MODELS: dict[str, dict[str, int]] = {
    "1.5b": {"hidden_size": 1536, "num_hidden_layers": 28, "num_attention_heads": 12, "num_key_value_heads": 2}
    | {"intermediate_size": 8960, "vocab_size": 151_936},
    "7b": {"hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4}
    | {"intermediate_size": 18_944, "vocab_size": 152_064},
    "14b": {"hidden_size": 5120, "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8}
    | {"intermediate_size": 13_824, "vocab_size": 152_064},
}

PAPER_SPEEDUP = {"1.5b": 1.36, "7b": 1.31, "14b": 1.50}
PAPER_PRICE = {"1.5b": 1.42, "7b": 1.31, "14b": 1.50}
PAPER_RATE = {"1.5b": 1.79 / 1.84, "7b": 6.00 / 5.98, "14b": 2.30 / 2.16}
"""Of 32 mixed GPUs against 24 H800s."""

AS_PUBLISHED = Options(weights="full", blocking=True)

JOB = {
    "model": "m",
    "dataset": {"path": "x.jsonl"},
    "rewards": [{"builtin": "exact_match"}],
    # AReaL's own defaults: 512 prompts of 16 responses, four versions of staleness.
    "sampling": {"num_generations": 16, "max_completion_length": 27_648},
    "algorithm": {"prompts_per_step": 512, "micro_batch_tokens": 32_768},
    "staleness": {"max_staleness": 4},
    "rollout": {"max_inflight_per_worker": 1024},
}


def machines(**kinds: int) -> Inventory:
    """Return so many machines of each kind."""
    known: dict[str, dict[str, Any]] = {
        "h800": {"gpu": "H800", "gpus": 8, "usd_per_hour": "42.24", "link_gb_per_s": 200},
        "h20": {"gpu": "H20", "gpus": 8, "usd_per_hour": "14.80", "link_gb_per_s": 450},
        "h100": {"gpu": "H100", "gpus": 8, "usd_per_hour": "23.60", "link_gb_per_s": 450},
        "a100": {"gpu": "A100-80GB", "gpus": 8, "usd_per_hour": "11.12", "link_gb_per_s": 300},
        "h200": {"gpu": "H200", "gpus": 8, "usd_per_hour": "11.60", "market": "spot", "availability": 0.8},
        "l40s": {"gpu": "L40S", "gpus": 4, "usd_per_hour": "6.20", "market": "spot", "link_gb_per_s": 32},
    }
    return inventory.parse(
        {"machines": [{"name": name, "count": count, **known[name]} for name, count in kinds.items()]}
    )


def plan(stock: Inventory, model: str, mean: float, options: Options | None = None) -> Plan:
    """Return the best plan for one model."""
    work = workload.workload(parse(JOB), workload.shape(MODELS[model]), response_tokens=mean)
    return solve.solve(stock, work, options).best


def seconds(stock: Inventory) -> list[float]:
    """Return how long it takes to plan, once for each mean length."""
    found = []
    for mean in MEANS[:MEASUREMENTS]:
        began = time.monotonic()
        plan(stock, "14b", mean)
        found.append(time.monotonic() - began)
    return found


def compare(report: Report) -> None:
    """Put AReaL-Hex's figures into the report."""
    h800, mixed = machines(h800=4), machines(h800=3, h20=3)
    fewer, cheaper = machines(h800=3), machines(h800=1, h20=3)
    for model in MODELS:
        speedups, ours, rates, prices = [], [], [], []
        for mean in MEANS:
            alone = plan(h800, model, mean, AS_PUBLISHED)
            together = plan(mixed, model, mean, AS_PUBLISHED)
            speedups.append(together.tokens_per_s / alone.tokens_per_s)
            ours.append(plan(mixed, model, mean).tokens_per_s / alone.tokens_per_s)
            few, cheap = plan(fewer, model, mean, AS_PUBLISHED), plan(cheaper, model, mean, AS_PUBLISHED)
            rates.append(cheap.tokens_per_s / few.tokens_per_s)
            prices.append(few.usd_per_million_tokens / cheap.usd_per_million_tokens)
        report.median(f"speedup_at_equal_money_{model}", f"x (paper {PAPER_SPEEDUP[model]:.2f})", speedups)
        report.median(f"the_same_with_deltas_{model}", "x", ours)
        report.median(f"rate_of_$86.64_to_$126.72_{model}", f"x (paper {PAPER_RATE[model]:.2f})", rates)
        report.median(f"tokens_per_dollar_of_these_{model}", f"x (paper {PAPER_PRICE[model]:.2f})", prices)


def measure(report: Report, *, quick: bool) -> None:
    """Measure everything."""
    report.median("plan_56_gpus", "s", seconds(machines(h800=4, h20=3)))
    if not quick:
        report.median("plan_1000_gpus", "s", seconds(machines(h800=31, h20=31, h100=16, a100=16, h200=15, l40s=32)))
    compare(report)


def bars(report: Report, *, quick: bool) -> None:
    """Say what the figures must be."""
    report.bar("plan_56_gpus", 10, "two kinds")
    if not quick:
        report.bar("plan_1000_gpus", 60, "six kinds")


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="benchmarks.planner", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave 1,000 GPUs out")
    quick = parser.parse_args().quick

    def run(report: Report, _: Path) -> None:
        measure(report, quick=quick)

    return command.run("planner", run, lambda report: bars(report, quick=quick))


if __name__ == "__main__":
    sys.exit(main())
