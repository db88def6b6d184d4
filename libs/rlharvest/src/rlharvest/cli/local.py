"""Commands on this machine: `up`, and what speaks to a running one; `doctor`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer
from rich.console import Console
from rich.text import Text

from rlharvest.cli import exits
from rlharvest.errors import NotFound
from rlharvest.local import control
from rlharvest.local.datadir import DataDirectory
from rlharvest.local.logview import LogView

if TYPE_CHECKING:
    from rlharvest.local.launcher import Plan

app = typer.Typer()
console = Console(highlight=False)

Data = Annotated[
    Path,
    typer.Option("--data", envvar="RLHARVEST_DATA_DIR", help="Data directory of `rlharvest up`.", show_default=True),
]
DEFAULT_DATA = Path(".rlharvest")
LEVELS = {"ok": "green", "warn": "yellow", "fail": "red"}


@app.command()
def up(
    data: Data = DEFAULT_DATA,
    rollout: Annotated[int, typer.Option("--rollout", min=0, max=256, help="Rollout workers.")] = 2,
    trainers: Annotated[
        int, typer.Option("--trainers", min=0, max=64, help="Trainers: jobs that train at a time.")
    ] = 1,
    slots: Annotated[int | None, typer.Option("--slots", min=1, help="Responses a worker runs at a time.")] = None,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="Of each torch process; unset: an equal share of the cores.")
    ] = None,
    standby: Annotated[bool, typer.Option("--standby", help="A second coordinator that takes over.")] = False,
    host: Annotated[
        str, typer.Option("--host", help="Address of the API; one that others reach needs a token.")
    ] = "127.0.0.1",
    port: Annotated[
        int | None, typer.Option("--port", min=0, max=65535, help="Of the API and the web page; 0: any.")
    ] = None,
    nats_port: Annotated[int | None, typer.Option("--nats-port", min=0, max=65535)] = None,
    valkey_port: Annotated[int | None, typer.Option("--valkey-port", min=0, max=65535)] = None,
    root: Annotated[
        list[Path] | None,
        typer.Option("--root", help="Directory that models, data and rewards of jobs may lie in; unset: this one."),
    ] = None,
    log_level: Annotated[str, typer.Option("--log-level", help="debug, info, warning or error.")] = "info",
) -> None:
    """Run NATS, Valkey and all services on this machine until Ctrl-C. The same data directory continues its jobs."""
    _need_local()
    from rlharvest.local.cores import cores
    from rlharvest.local.plan import Options
    from rlharvest.local.up import up as run

    if log_level not in ("debug", "info", "warning", "error"):
        raise typer.BadParameter(
            f"{log_level!r} is no level; use debug, info, warning or error", param_hint="--log-level"
        )
    options = Options(
        data=data.absolute(),
        roots=tuple(path.resolve() for path in root or [Path.cwd()]),
        rollout=rollout,
        trainers=trainers,
        slots=slots,
        standby=standby,
        api_host=host,
        log_level=log_level,
        cores=cores(),
        threads=threads or _given_threads(),
    )
    given = {
        name: value
        for name, value in (("api", port), ("nats", nats_port), ("valkey", valkey_port))
        if value is not None
    }
    view = LogView(sys.stdout, colour=sys.stdout.isatty() and "NO_COLOR" not in os.environ, level=log_level)

    def ready(plan: Plan, token: str, seconds: float) -> None:
        where = (
            "" if plan.url == "http://127.0.0.1:8080" else f"   (export RLHARVEST_URL={plan.url} for other directories)"
        )
        print(
            f"\n  rlharvest is up ({seconds:.1f} s). Data: {options.data}\n\n"
            f"    web page   {plan.url}/login#{quote(token, safe='')}\n"
            f"    API        {plan.url}/docs{where}\n"
            f"    token      in {options.data}/secrets/coordinator/api_token; commands in this directory find it\n"
            f"    submit     rlharvest submit job.yaml --watch\n"
            f"    scale      rlharvest scale {options.rollout + 2}      more or fewer workers, while jobs run\n"
            f"    stop       Ctrl-C\n",
            flush=True,
        )

    asyncio.run(run(options, view, given_ports=given, on_ready=ready))


@app.command()
def ps(
    data: Data = DEFAULT_DATA,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Show the programs of a running `rlharvest up`."""
    answer = _ask(data, {"verb": "ps"})
    if as_json:
        print(json.dumps(answer, indent=2))
        return
    print(f"{answer['url']}  {'ready' if answer['ready'] else 'starting'}  launcher {answer['pid']}")
    for program in answer["programs"]:
        print(
            f"{program['name']:<20} {program['state']:<10} pid {program['pid']:<8} "
            f"{program['seconds']:>8.0f} s  restarts {program['restarts']}  {program['log']}"
        )


@app.command()
def scale(
    workers: Annotated[int, typer.Argument(min=0, max=256, metavar="N", help="Rollout workers.")],
    data: Data = DEFAULT_DATA,
) -> None:
    """Change the number of rollout workers of a running `rlharvest up`. Those that go hand back what they hold."""
    answer = _ask(data, {"verb": "scale", "rollout": workers})
    changes = [f"{name} starts" for name in answer["started"]] + [f"{name} leaves" for name in answer["stopping"]]
    print(", ".join(changes) or f"there are {workers} already")


@app.command()
def backup(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Tar file to make; - is standard output.")],
    data: Data = DEFAULT_DATA,
) -> None:
    """Back a data directory up, also while it runs: jobs, samples, events, newest checkpoints."""
    from rlharvest.local import backup as backups

    raise typer.Exit(backups.backup(data.absolute(), file))


@app.command()
def restore(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Tar file of `rlharvest backup`; - is standard input.")],
    data: Data = DEFAULT_DATA,
) -> None:
    """Make a new data directory from a backup; `rlharvest up` on it goes on with its jobs."""
    from rlharvest.local import backup as backups

    raise typer.Exit(backups.restore(data.absolute(), file))


@app.command()
def secrets(
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="Where they are, or shall be.")],
    rotate: Annotated[
        str | None,
        typer.Option(
            "--rotate", metavar="TOKEN", help="api_token, worker_token or service_token: put a new one first."
        ),
    ] = None,
    readable: Annotated[
        bool, typer.Option("--readable", help="For volumes that one container mounts: its user may be any.")
    ] = False,
) -> None:
    """Make the secrets of a system, one directory a holder; what is there already stays."""
    from rlharvest.keyring import Keyring, given_secrets

    keyring = Keyring(directory, readable=readable)
    keyring.make(given_secrets(os.environ))
    if rotate is not None:
        keyring.rotate(rotate)
        print(f"{rotate}: a new one is sent from now on; the one before it stays good until the next --rotate")
    print(f"{directory}: the secrets are there")


@app.command()
def doctor(
    data: Data = DEFAULT_DATA,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Look at programs, ports, disk, memory and versions, with the fix for what is wrong. Exit code 1 on a failure."""
    _need_local()
    from rlharvest.local.doctor import examine

    findings = examine(data.absolute())
    if as_json:
        print(json.dumps([finding.as_dict() for finding in findings], indent=2))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            console.print(
                Text.assemble(
                    (f"{finding.level:<4}", LEVELS[finding.level]), f"  {finding.name:<{width}}  {finding.found}"
                ),
                soft_wrap=True,
            )
            if finding.fix and finding.level != "ok":
                console.print(Text(f"      {'':<{width}}  {finding.fix}", style="dim"), soft_wrap=True)
    if any(finding.level == "fail" for finding in findings):
        raise typer.Exit(exits.FAILED)


def _ask(data: Path, request: dict[str, Any]) -> dict[str, Any]:
    return control.ask(DataDirectory(data).control, request)


def _need_local() -> None:
    try:
        import psutil  # noqa: F401
    except ImportError as error:
        raise NotFound("this needs the local parts. Run: pip install 'rlharvest[local]'") from error


def _given_threads() -> int | None:
    given = os.environ.get("OMP_NUM_THREADS", "")
    return int(given) if given.isdecimal() and int(given) > 0 else None
