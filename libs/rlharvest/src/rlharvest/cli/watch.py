"""A job while it runs: a live screen on a terminal, lines elsewhere.

The screen is a pure function of one Snapshot. A server that does not answer for a while is waited for: watching a job
over a restart of its coordinator is the point.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from rlharvest.cli import tables
from rlharvest.cli.charts import plot, sparkline
from rlharvest.client import Client
from rlharvest.errors import NotLeader, Unavailable
from rlharvest.jobs.state import TERMINAL

CURVES = (("reward", "reward"), ("completions/mean_length", "length"), ("loss", "loss"), ("grad_norm", "gradient norm"))
COUNTERS = (
    ("trained_tokens", "trained"),
    ("generated_tokens", "generated"),
    ("salvaged_tokens", "salvaged"),
    ("regenerated_tokens", "regenerated"),
)


@dataclass(frozen=True)
class Snapshot:
    """A job at one moment."""

    job: Mapping[str, Any]
    steps: Sequence[int] = ()
    series: Mapping[str, Sequence[float | None]] = field(default_factory=dict)
    workers: Sequence[Mapping[str, Any]] = ()
    now: float = 0.0

    @property
    def ended(self) -> bool:
        """Whether the job will not change any more."""
        return self.job["status"] in TERMINAL

    def latest(self, name: str) -> float | None:
        """Return the newest value of a curve."""
        return next((value for value in reversed(self.series.get(name, ())) if value is not None), None)


def look(client: Client, job: str) -> Snapshot:
    """Ask the server."""
    metrics = client.metrics(job, names=[name for name, _ in CURVES], max_points=240)
    return Snapshot(client.get_job(job), metrics["steps"], metrics["series"], client.workers(), time.time())


def screen(snapshot: Snapshot, *, width: int = 100) -> RenderableType:
    """Return the live screen."""
    job = snapshot.job
    progress = job["progress"]
    detail = job["status_detail"]
    title = Text.assemble((job["id"], "bold"), "  ", job["name"], "  ", tables.status(job["status"]))
    why = Text(job["error"] or detail["message"] or detail["reason"], style="red" if job["error"] else "dim")
    bar = Table.grid(padding=(0, 1), expand=False)
    bar.add_row(
        ProgressBar(total=max(1, progress["max_steps"]), completed=progress["step"], width=min(50, width - 40)),
        f"step {progress['step']}/{progress['max_steps']}",
        Text(_remaining(snapshot), style="dim"),
    )
    counters = "   ".join(f"{label} {tables.number(progress[name])}" for name, label in COUNTERS)
    parts: list[RenderableType] = [title, why, bar, Text.assemble(("tokens  ", "dim"), counters)]
    rewards = plot(snapshot.series.get("reward", ()), width=min(72, width - 14))
    if rewards:
        parts += [Text("\nreward", style="dim"), *(Text(line, style="green") for line in rewards)]
    small = Table.grid(padding=(0, 2))
    for name, label in CURVES[1:]:
        if snapshot.latest(name) is not None:
            small.add_row(
                Text(label, style="dim"), sparkline(snapshot.series[name], 32), tables.number(snapshot.latest(name))
            )
    if small.row_count:
        parts += [Text(""), small]
    mine = [row for row in snapshot.workers if row["job"] in (job["id"], None) and row["state"] not in ("dead", "gone")]
    if not snapshot.ended:
        lost = job["workers"]["lost_total"]
        parts += [Text(f"\nworkers ({lost} lost so far)", style="dim"), tables.workers(mine, snapshot.now)]
    return Group(*parts)


def line(snapshot: Snapshot) -> str:
    """Return the job in one line, for output that is no terminal."""
    progress = snapshot.job["progress"]
    parts = [f"{snapshot.job['status']:<10} step {progress['step']}/{progress['max_steps']}"]
    for name, label in CURVES[:2]:
        if (value := snapshot.latest(name)) is not None:
            parts.append(f"{label} {tables.number(value)}")
    parts.append("tokens " + " ".join(f"{label} {progress[name]}" for name, label in COUNTERS))
    ready = sum(1 for row in snapshot.workers if row["job"] == snapshot.job["id"] and row["state"] == "ready")
    parts.append(f"workers {ready} ready, {snapshot.job['workers']['lost_total']} lost")
    detail = snapshot.job["status_detail"]
    why = snapshot.job["error"] or detail["message"] or detail["reason"]
    return "  ".join(parts) + (f"  ({why})" if why else "")


def follow(client: Client, job: str, console: Console, *, every_s: float = 1.0) -> Mapping[str, Any]:
    """Show a job until it ends; return it as it was last.

    Raises:
        Unavailable: nobody answered at the first try; later silence is waited for.
        NotFound: the job does not exist, or was deleted.
    """
    last: Snapshot | None = None
    if console.is_terminal:
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            for snapshot, problem in _snapshots(client, job, every_s):
                last = snapshot or last
                if last is None:
                    continue
                shown = screen(last, width=console.width)
                warning = Text(f"{problem}; trying on", style="yellow") if problem else Text("")
                live.update(Group(shown, warning) if problem else shown, refresh=True)
    else:
        told = None
        for snapshot, problem in _snapshots(client, job, every_s):
            if problem:
                console.print(f"{problem}; trying on", markup=False, highlight=False, soft_wrap=True)
                continue
            last = snapshot or last
            if last is None:
                continue
            detail = last.job["status_detail"]
            key = (last.job["status"], detail["reason"], last.job["progress"]["step"])
            if key != told:
                console.print(line(last), markup=False, highlight=False, soft_wrap=True)
                told = key
    assert last is not None
    return last.job


def _snapshots(client: Client, job: str, every_s: float) -> Iterator[tuple[Snapshot | None, str | None]]:
    """Yield a snapshot, or what keeps the server from giving one, until the job has ended."""
    seen = False
    while True:
        try:
            snapshot = look(client, job)
        except (Unavailable, NotLeader) as error:
            if not seen:
                raise
            yield None, str(error)
        else:
            seen = True
            yield snapshot, None
            if snapshot.ended:
                return
        time.sleep(every_s)


def _remaining(snapshot: Snapshot) -> str:
    """Return how long the rest will take at the mean pace so far."""
    job = snapshot.job
    progress = job["progress"]
    started, step, most = job["started_at"], progress["step"], progress["max_steps"]
    if not started:
        return ""
    elapsed = (job["finished_at"] or snapshot.now) - started
    if snapshot.ended:
        return f"{elapsed:,.0f} s"
    if not 0 < step < most:
        return f"{elapsed:,.0f} s"
    return f"{elapsed:,.0f} s, about {elapsed / step * (most - step):,.0f} s to go"
