"""What the server answers, as tables and lines for people. Pure: JSON in, rich renderables out."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

Json = Mapping[str, Any]

STATUS_STYLES = {
    "succeeded": "green",
    "ready": "green",
    "running": "cyan",
    "failed": "red",
    "dead": "red",
    "suspect": "yellow",
    "draining": "yellow",
    "cancelled": "dim",
    "gone": "dim",
    "paused": "yellow",
}
LEVEL_STYLES = {"warn": "yellow", "error": "red"}


def age(since: float | None, now: float) -> str:
    """Return how long ago something was: `12 s`, `3 min`, `2 h`, `5 d`."""
    if since is None:
        return ""
    seconds = max(0.0, now - since)
    for limit, unit, divisor in ((120, "s", 1), (7200, "min", 60), (172800, "h", 3600)):
        if seconds < limit:
            return f"{seconds / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def clock(at: float) -> str:
    """Return a time of today as HH:MM:SS in this machine's zone, an earlier one with its date."""
    when = datetime.datetime.fromtimestamp(at).astimezone()
    today = datetime.datetime.now().astimezone().date()
    return when.strftime("%H:%M:%S" if when.date() == today else "%Y-%m-%d %H:%M:%S")


def status(word: str) -> Text:
    """Return a status in its colour."""
    return Text(word, style=STATUS_STYLES.get(word, ""))


def number(value: float | None, digits: int = 4) -> str:
    """Return a number with few digits, thousands set apart; nothing for None."""
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) else f"{value:.{digits}g}"


def jobs(rows: Sequence[Json], now: float) -> RenderableType:
    """Return the list of jobs."""
    if not rows:
        return Text("There is no job yet. Submit one: rlharvest submit job.yaml")
    table = _table("job", "name", "status", "step", "workers", "age", "why")
    for row in rows:
        progress = row["progress"]
        table.add_row(
            short(row["id"]),
            escape(row["name"]),
            status(row["status"]),
            f"{progress['step']}/{progress['max_steps']}",
            str(row["workers"]["ready"]),
            age(row["created_at"], now),
            escape(row["error"] or row["status_detail"]["message"] or row["status_detail"]["reason"]),
        )
    return table


def job(row: Json, now: float) -> RenderableType:
    """Return one job: where it is and why, its numbers, its settings."""
    detail = row["status_detail"]
    progress = row["progress"]
    facts: list[tuple[str, Any]] = [
        ("id", row["id"]),
        ("name", row["name"]),
        ("status", row["status"]),
        ("why", " ".join(part for part in (detail["reason"], detail["message"]) if part)),
        ("queue position", row.get("queue_position")),
        ("error", row["error"]),
        ("step", f"{progress['step']} of {progress['max_steps']}"),
        ("weight version", progress["weight_version"]),
        ("created", f"{clock(row['created_at'])} ({age(row['created_at'], now)} ago)"),
        ("started", clock(row["started_at"]) if row["started_at"] else None),
        ("finished", clock(row["finished_at"]) if row["finished_at"] else None),
        ("trainer", row["trainer"]),
        ("workers", f"{row['workers']['ready']} ready, {row['workers']['lost_total']} lost"),
        ("model", row["model"]),
        ("checkpoint", row["latest_checkpoint"]),
        *((name.replace("_", " "), value) for name, value in row["counters"].items()),
    ]
    table = Table.grid(padding=(0, 2))
    for name, value in facts:
        if value not in (None, ""):
            table.add_row(Text(name, style="dim"), escape(number(value) if isinstance(value, (int, float)) else value))
    return Group(table, Text("\njob", style="dim"), Text(json.dumps(row["spec"], indent=2, ensure_ascii=False)))


def workers(rows: Sequence[Json], now: float, *, everything: bool = True) -> RenderableType:
    """Return the workers; without `everything` only those that are here."""
    shown = [row for row in rows if everything or row["state"] not in ("dead", "gone")]
    if not shown:
        return Text("There is no worker. Start one: `rlharvest up`, or `rlharvest scale N` where one is up.")
    reserved = any(row["worker_class"] == "reserved" for row in shown)
    columns = ["worker", "state", "class", "host", "pid", "version", "held", "tokens/s", "tokens", "note"]
    table = _table(*(column for column in columns if column != "class" or reserved))
    for row in shown:
        left = f"left {age(row['left_at'], now)} ago" if row["left_at"] is not None else ""
        table.add_row(
            short(row["id"]),
            status(row["state"]),
            *([row["worker_class"]] if reserved else []),
            escape(row["hostname"][:16]),
            str(row["pid"]),
            number(row["version"]),
            f"{row['held']}/{row['slots']}",
            number(row["tokens_per_s"]),
            number(row["generated_tokens"]),
            escape(", ".join(part for part in (left, row["note"]) if part)),
        )
    return table


def audit(rows: Sequence[Json]) -> RenderableType:
    """Return who changed what."""
    if not rows:
        return Text("Nobody has changed anything.")
    table = _table("when", "who", "from", "what", "of", "result")
    for row in rows:
        when = f"{datetime.datetime.fromtimestamp(row['at']):%m-%d %H:%M}"
        subject = short(row["subject"]) if row["subject"] else ""
        words = (when, row["who"], row["address"], row["action"], subject, row["result"])
        table.add_row(*map(escape, words), style="" if row["done"] else "yellow")
    return table


def short(identifier: str) -> str:
    """Return the end of an id, which commands take as well as the whole."""
    return "…" + identifier[-10:]


def sample(row: Json) -> RenderableType:
    """Return one response: its text, its reward, and which worker generated which tokens under which version."""
    head = Text.assemble(
        (row["id"], "bold"),
        f"  reward {number(row['reward'])}  {row['length']} tokens  {row['finish'] or 'goes on'}  {row['state']}",
        "" if row["step"] is None else f"  batch {row['step']}",
    )
    parts: list[RenderableType] = [
        head,
        Text.assemble(("prompt    ", "dim"), row["prompt"].strip()),
        Text.assemble(("response  ", "dim"), row["text"].strip()),
    ]
    if len(row["components"]) > 1:
        values = ", ".join(
            f"{one['name']} {number(one['value'])} × {number(one['weight'])}" for one in row["components"]
        )
        parts.append(Text.assemble(("rewards   ", "dim"), values))
    if "pieces" in row:
        spans = [
            f"{piece['n']} by {piece['worker']} from {piece['offset']} (attempt {attempt(piece['attempt'])})"
            for piece in row["pieces"]
        ]
        runs = ", ".join(f"{run['n']} by version {run['version']}" for run in row["version_runs"])
        parts.append(Text.assemble(("tokens    ", "dim"), "; ".join(spans), f"  [{runs}]" if runs else ""))
    return Group(*parts, Text(""))


def attempt(fence: str) -> str:
    """Return a fencing number (epoch * 2**32 + n) as `epoch.n`."""
    value = int(fence)
    return f"{value >> 32}.{value & 0xFFFFFFFF}"


def event(row: Json) -> Text:
    """Return an event as a line."""
    return Text.assemble(
        (clock(row["created_at"]), "dim"),
        "  ",
        (f"{row['type']:<20}", LEVEL_STYLES.get(row["level"], "cyan")),
        "  ",
        (row["message"], LEVEL_STYLES.get(row["level"], "")),
        (f"  ({row['source']})" if row["source"] else "", "dim"),
    )


def _table(*columns: str) -> Table:
    """Return a table whose last column alone is wrapped."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    right = {"step", "workers", "age", "version", "held", "tokens/s", "tokens", "pid"}
    for column in columns:
        last = column == columns[-1]
        table.add_column(
            column, justify="right" if column in right else "left", no_wrap=not last, min_width=12 if last else None
        )
    return table
