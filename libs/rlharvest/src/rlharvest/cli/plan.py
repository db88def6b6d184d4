"""`rlharvest plan`: which machines train and which roll out. Needs no server."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from rlharvest.cli import spec
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import parse as parse_job

if TYPE_CHECKING:
    from rlharvest.planner.plan import Plan, Result

app = typer.Typer()
console = Console(highlight=False)


@app.command()
def plan(
    inventory_file: Annotated[
        Path,
        typer.Argument(metavar="INVENTORY.yaml", help="Machines, links and prices; docs/planner.md lists every field."),
    ],
    job_file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job, as for `rlharvest submit`.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Put a value over the job's; may be repeated.")
    ] = None,
    config: Annotated[
        Path | None, typer.Option("--config", help="The model's config.json. Unset: that in the job's model directory.")
    ] = None,
    prompt_tokens: Annotated[float | None, typer.Option(min=1, help="Mean tokens of a prompt.")] = None,
    response_tokens: Annotated[float | None, typer.Option(min=1, help="Mean tokens of a response.")] = None,
    full: Annotated[bool, typer.Option("--full", help="New weights travel whole, not as differences.")] = False,
    blocking: Annotated[bool, typer.Option("--blocking", help="Rollout waits while new weights travel.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say which machines should train, which should roll out, how, and what a step and a token then cost."""
    # Behind the command: scipy is slow to load, and an extra.
    try:
        from rlharvest.planner import inventory, solve, workload
    except ImportError as error:
        raise InvalidField(
            "plan", error.name, "is not installed", "Install it: pip install 'rlharvest[planner]'."
        ) from error
    stock = inventory.parse(spec.read(inventory_file, "inventory file", holds="an inventory", top="`machines:`"))
    job = parse_job(spec.load(job_file, settings))
    model = workload.shape(_config(config, job.model), bytes_per_weight=2 if job.rollout.dtype == "bfloat16" else 4)
    work = workload.workload(job, model, prompt_tokens=prompt_tokens, response_tokens=response_tokens)
    result = solve.solve(stock, work, solve.Options(weights="full" if full else "delta", blocking=blocking))
    if as_json:
        print(json.dumps({**result.describe(), "assumed": _assumed(work)}, indent=2))
    else:
        console.print(table(result, _assumed(work)))


def _config(given: Path | None, model: str) -> dict[str, Any]:
    path = given or Path(model) / "config.json"
    if given is None and not path.is_file():
        raise InvalidField(
            "model",
            model,
            "is no directory with a config.json on this machine",
            "Name one: --config path/to/config.json",
        )
    return spec.read(path, "config", holds="a model's configuration", top="`hidden_size` and the like")


def _assumed(work: Any) -> dict[str, float]:
    """Return what the plan takes for granted about the job."""
    return {
        "parameters": work.shape.parameters,
        "responses": work.responses,
        "prompt_tokens": work.prompt_tokens,
        "response_tokens": work.response_tokens,
        "context_tokens": work.context_tokens,
    }


def table(result: Result, assumed: dict[str, float]) -> RenderableType:
    """Return the answer for people."""
    best, second = result.best, result.second
    parts: list[RenderableType] = [
        Text(
            f"{assumed['parameters'] / 1e9:.1f} billion parameters; {assumed['responses']:,} responses a step of "
            f"{assumed['response_tokens']:,.0f} tokens in the mean, prompts of {assumed['prompt_tokens']:,.0f}",
            style="dim",
        ),
        _placement(best),
        _figures(best),
        Text(f"The step waits for {best.binds}: {best.why}."),
    ]
    if best.unused:
        spare = ", ".join(f"{count} {name}" for name, count in best.unused.items())
        parts.append(Text(f"Not needed, at the same speed: {spare}."))
    if second is not None:
        data = second.training.data_parallel
        trains = " and ".join(
            f"{data * stage.tensor_parallel * stage.pipeline_parallel} {stage.machine}"
            for stage in second.training.stages
        )
        parts.append(
            Text(
                f"Second best: training on {trains} GPUs; a step of {second.step_s:,.1f} s "
                f"({second.step_s / best.step_s - 1:+.1%}), ${second.usd_per_million_tokens:,.3f} for a million tokens."
            )
        )
    ways = f"{result.considered:,} ways" if result.considered > 1 else "One way"
    compared = f"{ways} to divide the machines, compared"
    parts.append(Text(f"{compared}{'' if result.exact else ', to one part in ten thousand'}.", style="dim"))
    return Group(*parts)


def _placement(plan: Plan) -> Table:
    rows = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "machines", "GPUs", "parallel", "batch", "tokens/s", "share"):
        rows.add_column(column, justify="left" if column in ("", "machines", "parallel") else "right", no_wrap=True)
    training = plan.training
    for at, stage in enumerate(training.stages):
        gpus = training.data_parallel * stage.tensor_parallel * stage.pipeline_parallel
        how = f"DP {training.data_parallel} {_degrees(stage.tensor_parallel, stage.pipeline_parallel)}"
        if len(training.stages) > 1:
            how += f" ({stage.layers} layers)"
        rows.add_row("train" if at == 0 else "", escape(stage.machine), str(gpus), how, "", "", "")
    for at, one in enumerate(plan.rollout):
        rows.add_row(
            "rollout" if at == 0 else "",
            escape(one.machine),
            str(one.gpus),
            f"{one.replicas} × {_degrees(one.tensor_parallel, one.pipeline_parallel)}",
            f"{one.batch:,}",
            f"{one.tokens_per_s * one.replicas:,.0f}",
            f"{one.share:.1%}",
        )
    return rows


def _degrees(tensor: int, pipeline: int) -> str:
    return f"TP {tensor}" + (f" PP {pipeline}" if pipeline > 1 else "")


def _figures(plan: Plan) -> Table:
    rows = Table.grid(padding=(0, 2))
    for name, value in (
        ("step", f"{plan.step_s:,.1f} s"),
        ("training", f"{plan.train_s:,.1f} s"),
        ("rollout", f"{plan.rollout_s:,.1f} s"),
        ("weights", f"{plan.pull_s:,.1f} s until all have them, {plan.swap_s:.1f} s of pause"),
        ("tokens", f"{plan.tokens_per_s:,.0f} a second"),
        ("money", f"${plan.usd_per_hour:,.2f} an hour, ${plan.usd_per_million_tokens:,.3f} for a million tokens"),
    ):
        rows.add_row(Text(name, style="dim"), value)
    return rows
