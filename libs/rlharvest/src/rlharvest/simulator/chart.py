"""Charts of outcomes, where matplotlib is there: who did what when, tokens/s and dollars over time.

Colours are told apart by people who see few of them, and each state has a place in the legend.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from rlharvest.simulator.outcome import Outcome

AVAILABLE = importlib.util.find_spec("matplotlib") is not None

COLOURS = {
    "rollout": "#0072B2",
    "train": "#009E73",
    "wait": "#D55E00",
    "switch": "#CC79A7",
    "boot": "#999999",
    "load": "#E69F00",
    "idle": "#DDDDDD",
}
MOST_ROWS = 60
"""Workers in a chart."""


def draw(outcomes: Sequence[Outcome], out: Path) -> list[Path]:
    """Draw the charts of all outcomes into a directory; return their files. Without matplotlib there are none."""
    if not AVAILABLE:
        return []
    paths = [_gantt(outcome, out / f"{outcome.strategy}-workers.png") for outcome in outcomes]
    return [*paths, _progress(outcomes, out / "progress.png")]


def _figure(height: float, rows: int = 1) -> tuple[Any, Any]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.subplots(rows, 1, sharex=True)


def _gantt(outcome: Outcome, path: Path) -> Path:
    names = sorted({stretch.who for stretch in outcome.stretches}, key=lambda name: (name != "trainer", name))
    shown = {name: row for row, name in enumerate(names[:MOST_ROWS])}
    figure, axes = _figure(1.5 + 0.22 * max(3, len(shown)))
    for state, colour in COLOURS.items():
        bars = [item for item in outcome.stretches if item.state == state and item.who in shown]
        axes.barh(
            [shown[item.who] for item in bars],
            [(item.end_s - item.start_s) / 60 for item in bars],
            left=[item.start_s / 60 for item in bars],
            height=0.8,
            color=colour,
            label=state,
        )
    for step in outcome.steps:
        axes.axvline(step.end_s / 60, color="black", linewidth=0.3)
    axes.set_yticks(range(len(shown)), list(shown), fontsize=7)
    axes.invert_yaxis()
    left_out = "" if len(names) <= MOST_ROWS else f", {MOST_ROWS} of {len(names)} workers"
    axes.set_title(f"{outcome.scenario}: {outcome.strategy}{left_out}")
    axes.set_xlabel("minutes")
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.12 - 0.5 / max(3, len(shown))), ncols=7, fontsize=8)
    figure.savefig(path, dpi=110)
    return path


def _progress(outcomes: Sequence[Outcome], path: Path) -> Path:
    figure, (speed, money) = _figure(7, 2)
    for outcome in outcomes:
        ends = [step.end_s / 60 for step in outcome.steps]
        speed.plot(ends, [step.tokens / step.seconds for step in outcome.steps], marker=".", label=outcome.strategy)
        tokens = list(accumulate(step.tokens for step in outcome.steps))
        price = [1e6 * float(spent.dollars) / done for spent, done in zip(outcome.spent, tokens, strict=True)]
        money.plot(ends, price, marker=".", label=outcome.strategy)
    speed.set_ylabel("trained tokens/s")
    speed.set_ylim(bottom=0)
    money.set_ylabel("$ per million tokens so far")
    money.set_ylim(bottom=0)
    money.set_xlabel("minutes")
    for axes in (speed, money):
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=110)
    return path
