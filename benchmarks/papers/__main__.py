"""RLBoost's figures, ours, and whether ours was fitted or is a prediction.

    python -m benchmarks.papers [--traces DIR]

Two constants are fitted to two calibration points (fitted.py); everything else follows. The cost identity must hold exactly,
held-out points within BAR. A miss is printed as one.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from rlharvest.money import figures
from rlharvest.simulator import market, scenario
from rlharvest.simulator.market import Change, Trace
from rlharvest.simulator.outcome import Outcome
from rlharvest.simulator.strategy import NAMED, Strategy
from rlharvest.simulator.world import World

from benchmarks.papers import fitted
from benchmarks.report import Report

BAR = 0.15
SETTLED = 6
"""Steps that the controllers are given to settle; they are not counted."""
RLBOOST = NAMED["rlboost"]


@dataclass(frozen=True, slots=True)
class Row:
    """One figure."""

    name: str
    paper: float
    ours: float
    kind: str
    """`identity` and `predicted` have a bar, `fitted` and `reported` have none."""
    exact: bool = False

    @property
    def error(self) -> float:
        """Of ours, relative."""
        return self.ours / self.paper - 1

    @property
    def met(self) -> bool | None:
        """Whether the bar is met; None without one."""
        if self.exact:
            return self.ours == self.paper
        return abs(self.error) <= BAR if self.kind == "predicted" else None


def play(values: dict[str, Any], strategy: Strategy, trace: Trace | None = None) -> Outcome:
    """Play a scenario."""
    outcome = World(scenario.parse(values), strategy, trace).play()
    print(f"  {values['name']} {strategy.name}: {outcome.wall_s:.1f} s", file=sys.stderr, flush=True)
    return outcome


def verl(model: str = "14B", **workload: Any) -> Outcome:
    """Return the colocated baseline."""
    values = fitted.scenario(model, fixed=0)
    return play(values | {"steps": 8, "workload": values["workload"] | workload}, NAMED["colocated"])


def speedup(one: Outcome, base: Outcome) -> float:
    """Return trained tokens/s against a baseline's, both settled."""
    return one.tokens_per_s(SETTLED) / base.tokens_per_s(SETTLED)


def efficiency(one: Outcome, base: Outcome, nodes: int = 1) -> float:
    """Return tokens a dollar against a baseline's, by the cost identity, over the settled steps."""
    ratio = one.instances(SETTLED) * float(fitted.SPOT_USD) / (float(fitted.RESERVED_USD) * nodes)
    return speedup(one, base) / (1 + ratio)


def identity() -> Iterator[Row]:
    """The bill of a run must obey the identity to the last tick."""
    values = fitted.scenario(fixed=4) | {"steps": 3}
    one, base = play(values, RLBOOST), play(values, NAMED["colocated"])
    bills = (Fraction(base.total.ticks) / base.tokens) / (Fraction(one.total.ticks) / one.tokens)
    seconds = Fraction(base.reserved.total.ticks, one.reserved.total.ticks)
    said = figures.efficiency(speedup=seconds, reserved=one.reserved.total, spot=one.spot.total)
    yield Row("cost identity, tokens/$ by bills", float(said), float(bills) if bills == said else 0.0, "identity", True)


def instances(base: Outcome) -> Iterator[Row]:
    """14B with one to six instances that never go."""
    seeds: dict[int, float] = {}
    for n in range(1, 7):
        one = play(fitted.scenario(fixed=n), RLBOOST)
        seeds[n] = statistics.mean(step.seed_asked_s for step in one.settled(SETTLED))
        if n == 1:
            yield Row("14B, 1 instance: throughput", 1.37, speedup(one, base), "predicted")
            yield Row("14B, 1 instance: tokens/$", 1.288, efficiency(one, base), "predicted")
        if n == 6:
            yield Row("14B, 6 instances: throughput", 2.247, speedup(one, base), "predicted")
            yield Row("14B, 6 instances: tokens/$", 1.627, efficiency(one, base), "predicted")
    yield Row("T_seed with 1 instance, s", fitted.SEED_S[1], seeds[1], "fitted")
    for n in range(2, 7):
        yield Row(f"T_seed({n}) / T_seed(1)", fitted.SEED_S[n] / fitted.SEED_S[1], seeds[n] / seeds[1], "reported")


def churn(at_s: float, *, period_s: float, away: int, n: int = 6) -> Trace:
    """Return a trace of n instances of which `away` go at `at_s` and come back half a period later, again and again."""
    changes = [Change(0.0, f"p{k}", True) for k in range(n)]
    changes += [Change(at_s, f"p{k}", False) for k in range(away)]
    changes += [Change(at_s + period_s / 2, f"p{k}", True) for k in range(away)]
    return Trace(tuple(changes), period_s)


def ablations() -> Iterator[Row]:
    """14B, five of six instances preempted and back: without seeding, without memory."""
    values, trace = fitted.scenario(), churn(1200, period_s=3600, away=5)
    values |= {"steps": 24}
    whole = play(values, RLBOOST, trace)
    bare = play(values, replace(RLBOOST, name="no seeding", seeding=False), trace)
    forgetful = play(values, replace(RLBOOST, name="no memory", memory=False), trace)
    yield Row("no seeding: throughput", 0.81, speedup(bare, whole), "predicted")
    yield Row("memory: throughput", 1.06, speedup(whole, forgetful), "predicted")


def migration() -> Iterator[Row]:
    """Three of six go at 100 s or 200 s into a rollout: overhead of migrating against recomputing."""
    values = fitted.scenario() | {"steps": 1}
    still = Trace(tuple(Change(0.0, f"p{k}", True) for k in range(6)), 1e9)
    values["market"] = values["market"] | {"boot_s": 0, "most": 6}
    uncapped = replace(RLBOOST, cap=False)
    base = play(values, uncapped, still).seconds
    for at_s, paper in ((100.0, 0.33), (200.0, 0.76)):
        gone = Trace((*still.changes, *(Change(at_s, f"p{k}", False) for k in range(3))), 1e9)
        kept = play(values, uncapped, gone).seconds - base
        anew = play(values, replace(uncapped, name="recompute", keep_tokens=False), gone).seconds - base
        yield Row(
            f"overhead saved by migration at {at_s:.0f} s", paper, 1 - kept / anew if anew > 0 else 0.0, "predicted"
        )


def growth() -> Iterator[Row]:
    """Appendix E: the cap of the responses from 5K to 14K, instances as N_prem says."""
    for most, n, throughput, cost in ((5120, 3, 1.47, 1.24), (14336, 6, 2.22, 1.61)):
        values = fitted.scenario(fixed=n)
        workload = {"max_tokens": most}
        one = play(values | {"workload": values["workload"] | workload}, RLBOOST)
        base = verl(max_tokens=most)
        yield Row(
            f"14B, {most // 1024}K responses, {n} instances: throughput", throughput, speedup(one, base), "predicted"
        )
        yield Row(f"14B, {most // 1024}K responses, {n} instances: tokens/$", cost, efficiency(one, base), "predicted")


def segments(traces: Path | None) -> Iterator[Row]:
    """Three models under a trace: Bamboo's, of which half the instances are ours, or one that is made up."""
    name = traces / "bamboo" / "p3-trace.csv" if traces is not None else None
    if name is not None and not name.exists():
        raise SystemExit(f"{name} is not there; --traces names a directory with bamboo/p3-trace.csv")
    for model, throughput, cost in (("8B", 1.66, 1.34), ("14B", 1.97, 1.49), ("32B", 1.51, 1.28)):
        where: dict[str, Any] = {"most": round(fitted.SPOTS[model]) + 1}
        if name is not None:
            where |= {"trace": str(name), "start_h": 2.0, "hours": 2.0, "share": 0.5}
        values = fitted.scenario(model, **where)
        trace = market.of(scenario.parse(values).market, 7)
        one, base = play(values, RLBOOST, trace), verl(model)
        yield Row(f"{model}, trace: throughput", throughput, speedup(one, base), "predicted")
        yield Row(f"{model}, trace: tokens/$", cost, efficiency(one, base, fitted.NODES[model]), "predicted")
        yield Row(f"{model}, trace: instances", fitted.SPOTS[model], one.instances(SETTLED), "reported")


def table(rows: list[Row]) -> str:
    """Return the lines for people."""
    head = ("figure", "paper", "ours", "", "error", "bar", "")
    lines = [head]
    for row in rows:
        bar = "exact" if row.exact else f"{BAR:.0%}" if row.kind == "predicted" else ""
        verdict = "" if row.met is None else "met" if row.met else "MISSED"
        lines.append((row.name, f"{row.paper:.3g}", f"{row.ours:.3g}", row.kind, f"{row.error:+.1%}", bar, verdict))
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines
    )


def main(arguments: list[str] | None = None) -> int:
    """Run; the exit status says whether every bar is met."""
    parser = argparse.ArgumentParser(description="The papers' figures against the simulator's.")
    parser.add_argument("--traces", type=Path, default=os.environ.get("RLHARVEST_TRACES"), help="public spot traces")
    options = parser.parse_args(arguments)
    base = verl()
    settled = base.settled(SETTLED)
    share = 1 - sum(step.train_s for step in settled) / sum(step.seconds for step in settled)
    rows = [Row("rollout's share of a veRL step", fitted.ROLLOUT_SHARE, share, "fitted")]
    for part in (identity(), instances(base), ablations(), migration(), growth(), segments(options.traces)):
        rows += part
    print(table(rows))
    report = Report("papers")
    for row in rows:
        name = re.sub(r"[^a-z0-9]+", "_", row.name.lower()).strip("_")
        report.count(name, row.kind, row.ours)
        if row.met is not None:
            report.count(f"{name}_error", "", abs(row.error))
            report.bar(f"{name}_error", 0 if row.exact else BAR, "of the paper's figure")
    missed = [name for name, bar in report.bars.items() if not bar.met]
    print(f"{len(missed)} of {len(report.bars)} bars missed")
    print(report.line(), flush=True)
    return report.status


if __name__ == "__main__":
    sys.exit(main())
