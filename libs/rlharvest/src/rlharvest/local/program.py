"""A program that the launcher runs: what it is called, how it starts, how one knows it is ready, how it stops."""

from __future__ import annotations

import asyncio
import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Http:
    """Ready when a URL answers 200."""

    url: str

    async def problem(self) -> str | None:
        """Return None when ready, else one sentence."""
        return await asyncio.to_thread(self._ask)

    def _ask(self) -> str | None:
        try:
            with urllib.request.urlopen(self.url, timeout=2) as reply:  # noqa: S310 - an address of ours
                return None if reply.status == 200 else f"answers {reply.status}"
        except urllib.error.HTTPError as error:
            return _sentence(error.read(65536), error.code)
        except (OSError, urllib.error.URLError):
            return "does not answer yet"


@dataclass(frozen=True)
class Redis:
    """Ready when a Redis server has loaded its data and answers PING."""

    host: str
    port: int

    async def problem(self) -> str | None:
        """Return None when ready, else one sentence."""
        try:
            async with asyncio.timeout(2):
                reader, writer = await asyncio.open_connection(self.host, self.port)
                writer.write(b"PING\r\n")
                reply = await reader.readline()
                writer.close()
        except (OSError, TimeoutError):
            return "does not answer yet"
        return None if reply.startswith(b"+PONG") else reply.decode(errors="replace").strip() or "closed the connection"


Probe = Http | Redis


@dataclass(frozen=True)
class Program:
    """One child to be."""

    name: str
    """Unique; `rollout-2` is the second of the role `rollout`."""
    role: str
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    probe: Probe | None = None
    """None: ready as soon as it runs."""
    ready_s: float = 120.0
    """Longest time from start to ready."""
    grace_s: float = 10.0
    """From SIGTERM to SIGKILL."""
    may_leave: bool = False
    """Whether an exit with 0 is a leave in order, after which it is not started again."""
    quiet: bool = False
    """Show only its warnings on the terminal; the log file has everything."""


def _sentence(body: bytes, code: int) -> str:
    """Return what a /readyz that answers 503 says is missing."""
    try:
        failed = json.loads(body)["failed"]
        return "; ".join(f"{name}: {problem}" for name, problem in failed.items()) or f"answers {code}"
    except (ValueError, KeyError, TypeError, AttributeError):
        return f"answers {code}"
