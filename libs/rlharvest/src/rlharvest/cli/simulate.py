"""Play a scenario: what a run would take and cost, before it runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from rlharvest.cli import spec
from rlharvest.errors import InvalidField
from rlharvest.simulator import chart, market, scenario
from rlharvest.simulator.outcome import Outcome, compare
from rlharvest.simulator.scenario import Scenario
from rlharvest.simulator.strategy import NAMED
from rlharvest.simulator.world import World

app = typer.Typer()
console = Console(highlight=False)


@app.command()
def simulate(
    file: Annotated[Path, typer.Argument(metavar="SCENARIO.yaml", help="docs/simulator.md lists every field.")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write results as JSON there, and charts.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Put a value over the file's; may be repeated.")
    ] = None,
    traces: Annotated[
        Path | None,
        typer.Option(
            "--traces",
            metavar="DIR",
            envvar="RLHARVEST_TRACES",
            help="Where traces are that are not beside the scenario.",
        ),
    ] = None,
) -> None:
    """Simulate a scenario under each of its strategies, and compare them."""
    values = spec.read(file, "scenario", holds="one scenario", top="`model:`, `devices:`, `reserved:` and `market:`")
    for setting in settings or []:
        spec.override(values, setting)
    chosen = scenario.within(scenario.parse(values), file.absolute().parent, traces)
    if out is not None:
        _writable(out)
    outcomes = _play(chosen)
    _print(outcomes)
    if out is not None:
        for path in [*_write(outcomes, out), *chart.draw(outcomes, out)]:
            console.print(f"wrote {path}")
        if not chart.AVAILABLE:
            console.print("no charts: they need matplotlib (pip install 'rlharvest[sim]')")


def _play(chosen: Scenario) -> list[Outcome]:
    trace = market.of(chosen.market, chosen.seed)
    outcomes = []
    columns = (
        TextColumn("{task.description:<10}"),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}  {task.fields[hours]:.2f} h"),
        TimeElapsedColumn(),
    )
    # To standard error: the table alone is the output.
    with Progress(*columns, console=Console(stderr=True)) as bar:
        for name in chosen.strategies:
            task = bar.add_task(name, total=chosen.steps, hours=0.0)

            def show(world: World, task: TaskID = task) -> None:
                bar.update(task, completed=world.trainer.step, hours=world.clock.now / 3600)

            outcomes.append(World(chosen, NAMED[name], trace).play(show))
    return outcomes


def _print(outcomes: list[Outcome]) -> None:
    head, rows = compare(outcomes)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in head:
        table.add_column(column, justify="left" if column == "strategy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    # Not cut to the width of a terminal that is none.
    wide = console if console.is_terminal else Console(highlight=False, width=160)
    wide.print(table)


def _writable(out: Path) -> None:
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidField("--out", str(out), str(error.strerror), "Name a directory that can be made.") from error
    if not os.access(out, os.W_OK):
        raise InvalidField("--out", str(out), "cannot be written to", "Name another directory.")


def _write(outcomes: list[Outcome], out: Path) -> list[Path]:
    paths = []
    for outcome in outcomes:
        path = out / f"{outcome.strategy}.json"
        path.write_text(outcome.json() + "\n", encoding="utf-8")
        paths.append(path)
    return paths
