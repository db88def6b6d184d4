"""Commands on jobs and workers of a server."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group, RenderableType
from rich.text import Text

from rlharvest.cli import exits, export, spec, tables, watch
from rlharvest.cli.connection import JobName, Token, Url, connect, resolve
from rlharvest.client import Client
from rlharvest.jobs.state import Status

app = typer.Typer()
console = Console(highlight=False)

AsJson = Annotated[bool, typer.Option("--json", help="Print the server's JSON.")]


@app.command()
def submit(
    file: Annotated[Path, typer.Argument(metavar="JOB.yaml", help="The job; docs/job.md lists every field.")],
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="a.b=c", help="Put a value over the file's; may be repeated.")
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until it ends; print a line at each step.")] = False,
    watching: Annotated[bool, typer.Option("--watch", help="Show it live until it ends.")] = False,
    key: Annotated[
        str | None, typer.Option("--key", help="Idempotency key: the same key and job give the same job again.")
    ] = None,
    as_is: Annotated[
        bool, typer.Option("--as-is", help="Send paths as they are written, for a server on another machine.")
    ] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Submit a job and print its id. Paths in the file are relative to the file."""
    values = spec.load(file, settings, absolute=not as_is)
    with connect(url, token) as client:
        job = client.create_job(values, idempotency_key=key)
        print(job["id"], flush=True)
        if wait or watching:
            _follow(client, job["id"], Console(highlight=False, force_terminal=False) if not watching else console)


@app.command(name="jobs")
def list_jobs(
    status: Annotated[Status | None, typer.Option("--status", help="Only those.")] = None,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many, newest first.")] = 20,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """List jobs."""
    with connect(url, token) as client:
        rows = list(client.list_jobs(status=status.value if status else None, limit=limit))
    _show(rows, as_json, lambda: tables.jobs(rows, time.time()))


@app.command()
def show(job: JobName, as_json: AsJson = False, url: Url = None, token: Token = None) -> None:
    """Show one job: status and reason, counters, settings."""
    with connect(url, token) as client:
        row = client.get_job(resolve(client, job))
    _show(row, as_json, lambda: tables.job(row, time.time()))


@app.command(name="watch")
def watch_job(
    job: JobName,
    every: Annotated[float, typer.Option("--every", min=0.1, help="Seconds between two looks.")] = 1.0,
    url: Url = None,
    token: Token = None,
) -> None:
    """Follow a job until it ends: progress, curves, workers, tokens. Exit code 1 when it does not succeed."""
    with connect(url, token) as client:
        _follow(client, resolve(client, job), console, every)


@app.command()
def samples(
    job: JobName,
    step: Annotated[int | None, typer.Option("--step", min=0, help="Only those of this batch.")] = None,
    min_reward: Annotated[float | None, typer.Option("--min-reward", help="Only those with at least this.")] = None,
    limit: Annotated[int, typer.Option("-n", min=1, max=1000, help="How many, newest first.")] = 5,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show responses: text, reward, and which worker generated which tokens under which version."""
    with connect(url, token) as client:
        name = resolve(client, job)
        rows = client.samples(name, step=step, min_reward=min_reward, limit=limit)
        whole = [client.sample(name, row["id"]) for row in rows]
    nothing = Text("No response yet that fits.")
    _show(whole, as_json, lambda: Group(*(tables.sample(row) for row in whole)) if whole else nothing)


@app.command()
def workers(
    everything: Annotated[bool, typer.Option("--all", help="Also those that left.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """List workers."""
    with connect(url, token) as client:
        rows = client.workers()
    _show(rows, as_json, lambda: tables.workers(rows, time.time(), everything=everything))


@app.command()
def drain(
    worker: Annotated[str, typer.Argument(metavar="WORKER", help="Id, or a unique end of it.")],
    reason: Annotated[str, typer.Option("--reason", help="Kept with the worker.")] = "",
    url: Url = None,
    token: Token = None,
) -> None:
    """Tell a worker to hand back what it holds and leave. No token is lost."""
    with connect(url, token) as client:
        found = [row["id"] for row in client.workers() if row["id"].endswith(worker.removeprefix("…"))]
        name = found[0] if len(found) == 1 else worker
        print(f"{client.drain(name, reason=reason)['id']} drains")


@app.command()
def cancel(job: JobName, url: Url = None, token: Token = None) -> None:
    """End a job."""
    _verb("cancel", job, url, token)


@app.command()
def pause(job: JobName, url: Url = None, token: Token = None) -> None:
    """Pause a job: what runs is handed back, the trainer saves."""
    _verb("pause", job, url, token)


@app.command()
def resume(job: JobName, url: Url = None, token: Token = None) -> None:
    """Go on with a paused job."""
    _verb("resume", job, url, token)


@app.command()
def delete(
    job: JobName,
    checkpoints: Annotated[bool, typer.Option("--checkpoints", help="Also the files of its checkpoints.")] = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Delete a job that has ended, with its records and versions. Checkpoints stay unless asked for."""
    with connect(url, token) as client:
        name = resolve(client, job)
        left = client.delete(name, checkpoints=checkpoints)["checkpoints"]
    print(f"{name} is deleted" + (f"; its checkpoints are still in {left}" if left else ""))


@app.command()
def events(
    job: JobName,
    follow: Annotated[bool, typer.Option("-f", "--follow", help="Go on until the job ends.")] = False,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show what happened to a job."""
    with connect(url, token) as client:
        _print_events(client.events(resolve(client, job), follow=follow), as_json)


@app.command()
def audit(
    subject: Annotated[
        str | None, typer.Option("--of", metavar="ID", help="Only calls about this job or worker, by its whole id.")
    ] = None,
    limit: Annotated[int, typer.Option("-n", min=1, help="How many, newest first.")] = 20,
    as_json: AsJson = False,
    url: Url = None,
    token: Token = None,
) -> None:
    """Show who changed what through the API: name of the token, address, call, result."""
    with connect(url, token) as client:
        rows = list(client.audit(subject=subject, limit=limit))
    _show(rows, as_json, lambda: tables.audit(rows))


@app.command(name="export")
def export_model(
    job: JobName,
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A directory that does not exist yet.")],
    step: Annotated[
        int | None, typer.Option("--step", min=0, help="Checkpoint of this step; unset: the newest.")
    ] = None,
    weights_url: Annotated[
        str | None,
        typer.Option(
            "--weights-url", envvar="RLHARVEST_WEIGHTS_URL", help="Weight service, if the files are elsewhere."
        ),
    ] = None,
    url: Url = None,
    token: Token = None,
) -> None:
    """Write a job's model as a Hugging Face directory, every file verified."""
    export.check_target(target)
    with connect(url, token) as client:
        name = resolve(client, job)
        checkpoint = export.choose(client.checkpoints(name), step)
    source = Path(checkpoint["path"])
    if source.is_dir() and weights_url is None:
        files = export.from_checkpoint(source, target)
    else:
        service = weights_url or os.environ.get("RLHARVEST_WEIGHTS_URL") or "http://127.0.0.1:7083"
        files = export.from_weights(service, name, checkpoint["version"], target)
    size = sum(entry.size for entry in files)
    print(f"{target}: step {checkpoint['step']} of {name}, {len(files)} files, {size:,} bytes, verified")


def _follow(client: Client, job: str, output: Console, every_s: float = 1.0) -> None:
    try:
        last = watch.follow(client, job, output, every_s=every_s)
    except KeyboardInterrupt:
        output.print(f"\nThe job goes on. Watch it again with: rlharvest watch {job}")
        raise typer.Exit(exits.INTERRUPTED) from None
    if last["status"] != Status.SUCCEEDED:
        raise typer.Exit(exits.FAILED)


def _verb(verb: str, job: str, url: str | None, token: str | None) -> None:
    with connect(url, token) as client:
        row = getattr(client, verb)(resolve(client, job))
    print(f"{row['id']} is {row['status']}")


def _show(value: Any, as_json: bool, rendered: Callable[[], RenderableType]) -> None:
    if as_json:
        print(json.dumps(value, indent=2, ensure_ascii=False))
    else:
        console.print(rendered())


def _print_events(rows: Iterable[dict[str, Any]], as_json: bool) -> None:
    try:
        for row in rows:
            if as_json:
                print(json.dumps(row, ensure_ascii=False), flush=True)
            else:
                console.print(tables.event(row), soft_wrap=True)
    except KeyboardInterrupt:
        raise typer.Exit(exits.INTERRUPTED) from None
