"""Log lines of many programs as one stream for people.

Services write one JSON object a line, NATS and Valkey their own forms; each becomes `12:00:03 name      │ text
key=value`. Invariants: a line that is in no known form is shown as it is; nothing is ever dropped from the log file,
only from the terminal.
"""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

RANKS = {"debug": 0, "info": 1, "warning": 2, "error": 3, "critical": 3}
_COLOURS = (36, 32, 35, 34, 33, 96, 92, 95, 94, 93)
_HIDDEN = {"event", "level", "timestamp", "service", "logger", "exception", "stack", "exc_info"}
_NATS = re.compile(r"^\[\d+\] [\d/]+ [\d:.]+ \[(?P<level>[A-Z]{3})\] (?P<text>.*)$")
_VALKEY = re.compile(r"^\d+:[A-Z] \d+ \w+ \d+ [\d:.]+ (?P<mark>[.\-*#]) (?P<text>.*)$")
_NATS_LEVELS = {"INF": "info", "WRN": "warning", "ERR": "error", "FTL": "error", "DBG": "debug", "TRC": "debug"}
_KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Line:
    """A log line that was understood."""

    text: str
    level: str = "info"
    time: str = ""
    """HH:MM:SS of this machine's time zone, when the line says when it was written."""
    more: tuple[str, ...] = ()
    """A traceback."""


def parse(raw: str) -> Line:
    """Return a line's text and level; a line in an unknown form is `info` as it is."""
    if raw.startswith("{"):
        try:
            values = json.loads(raw)
        except json.JSONDecodeError:
            return Line(raw)
        return _structured(values) if isinstance(values, dict) and "event" in values else Line(raw)
    if found := _NATS.match(raw):
        return Line(found["text"], _NATS_LEVELS.get(found["level"], "info"))
    if found := _VALKEY.match(raw):
        return Line(found["text"], {"#": "warning", ".": "debug", "-": "debug"}.get(found["mark"], "info"))
    return Line(raw)


def _structured(values: Mapping[str, Any]) -> Line:
    fields = " ".join(f"{key}={_value(value)}" for key, value in values.items() if key not in _HIDDEN)
    text = f"{values['event']} {fields}".rstrip()
    time = ""
    try:
        time = datetime.datetime.fromisoformat(str(values["timestamp"])).astimezone().strftime("%H:%M:%S")
    except (KeyError, ValueError):
        pass  # a line without a time of its own gets the time of its arrival
    trace = tuple(str(values.get("exception") or values.get("stack") or "").splitlines())
    return Line(text, str(values.get("level", "info")), time, trace)


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return json.dumps(text, ensure_ascii=False) if text == "" or any(mark in text for mark in ' ="\n') else text


class LogView:
    """Writes what children print: whole to their files, rendered to one stream."""

    def __init__(self, output: TextIO, *, width: int = 12, colour: bool = False, level: str = "info") -> None:
        self.output = output
        self.width = width
        self.colour = colour
        self.level = RANKS[level]
        self._colours: dict[str, int] = {}

    def show(self, name: str, raw: str, *, quiet: bool = False) -> None:
        """Show a line of a child. `quiet`: only when it is a warning or worse."""
        line = parse(raw)
        rank = RANKS.get(line.level, 1)
        if rank < max(self.level, RANKS["warning"] if quiet else 0):
            return
        for text in (line.text, *(f"    {part}" for part in line.more)):
            self._write(name, text, time=line.time, rank=rank)

    def say(self, text: str, *, level: str = "info") -> None:
        """Show a line of the launcher itself."""
        self._write("rlharvest", text, time="", rank=RANKS[level])

    def _write(self, name: str, text: str, *, time: str, rank: int) -> None:
        time = time or datetime.datetime.now().astimezone().strftime("%H:%M:%S")
        label = name.ljust(self.width)
        if self.colour:
            role = name.partition("-")[0]
            code = self._colours.setdefault(role, _COLOURS[len(self._colours) % len(_COLOURS)])
            tint = {2: "33", 3: "31"}.get(rank)
            text = f"\x1b[{tint}m{text}\x1b[0m" if tint else text
            label = f"\x1b[{code}m{label}\x1b[0m"
            time = f"\x1b[2m{time}\x1b[0m"
        try:
            self.output.write(f"{time} {label} │ {text}\n")
            self.output.flush()
        except BrokenPipeError:
            pass  # the reader of a pipe left; the log files go on


def open_log(path: Path) -> BinaryIO:
    """Open a log to append to; one that has grown large is kept aside as `<name>.1` first."""
    if path.exists() and path.stat().st_size > _KEPT_BYTES:
        path.replace(path.with_suffix(path.suffix + ".1"))
    return path.open("ab")


def tail(path: Path, *, lines: int = 20) -> list[str]:
    """Return the last lines of a log, rendered without names."""
    try:
        with path.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - 65536))
            raw = file.read().decode(errors="replace").splitlines()[-lines:]
    except OSError:
        return []
    shown: list[str] = []
    for one in raw:
        line = parse(one)
        shown.extend([line.text, *(f"    {part}" for part in line.more)])
    return shown[-lines:]
