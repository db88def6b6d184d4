"""What a service wrote to its log, and when: the JSON lines of rlharvest.logs, read back."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from rlharvest.errors import Unavailable
from rlharvest.testing.system import Service


def lines(service: Service, event: str, *, after: float = 0.0) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (seconds since 1970, line) of one event, oldest first; lines that are not JSON are somebody else's."""
    for text in service.log.read_text(errors="replace").splitlines() if service.log.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:
            continue
        if isinstance(line, dict) and line.get("event") == event:
            at = datetime.fromisoformat(line["timestamp"]).timestamp()
            if at >= after:
                yield at, line


def wait_line(
    service: Service, event: str, *, after: float, timeout_s: float, **fields: Any
) -> tuple[float, dict[str, Any]]:
    """Return the first line of an event whose fields are these; wait for it.

    Raises:
        Unavailable: it was not written in time; carries the end of the log.
    """
    end = time.monotonic() + timeout_s
    while True:
        for at, line in lines(service, event, after=after):
            if all(line.get(name) == value for name, value in fields.items()):
                return at, line
        if time.monotonic() > end:
            raise Unavailable(f"{service.name} wrote no {event!r} within {timeout_s:g} s:\n{service.tail()}")
        time.sleep(0.02)
