"""Commands for a launcher that runs: one JSON object a line over a unix socket in its data directory, one line back.

    {"verb": "ps"}                     -> {"ok": true, "ready": …, "url": …, "programs": [{"name", "pid", "state", …}]}
    {"verb": "scale", "rollout": 3}    -> {"ok": true, "started": […], "stopping": […]}
    anything else                      -> {"ok": false, "error": …}

The socket is reached through /proc/self/fd, so that the length of the data directory's path does not matter (a socket's
own path is limited to 107 bytes). Who may use it is decided by its mode, 0600.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from rlharvest.errors import Conflict, RlharvestError, Unavailable

Handler = Callable[[dict[str, Any]], Awaitable[dict[str, Any]]]


@contextlib.contextmanager
def _address(path: Path) -> Iterator[str]:
    """A short name of a socket's path, valid inside the context."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)


class ControlServer:
    """Answers commands until it is closed."""

    def __init__(self, path: Path, handler: Handler) -> None:
        self.path = path
        self._handler = handler
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        """Listen; a socket file that a killed launcher left is replaced."""
        self.path.unlink(missing_ok=True)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        with _address(self.path) as address:
            mask = os.umask(0o177)
            try:
                listener.bind(address)
            finally:
                os.umask(mask)
        self._server = await asyncio.start_unix_server(self._serve, sock=listener)

    async def close(self) -> None:
        """Stop listening and remove the socket."""
        if self._server is not None:
            self._server.close()
        self.path.unlink(missing_ok=True)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(30):
                answer = await self._answer(await reader.readline())
                writer.write(json.dumps(answer).encode() + b"\n")
                await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    async def _answer(self, line: bytes) -> dict[str, Any]:
        try:
            request = json.loads(line)
            return {"ok": True, **await self._handler(request)}
        except json.JSONDecodeError:
            return {"ok": False, "error": "not a JSON object"}
        except RlharvestError as error:
            return {"ok": False, "error": str(error)}


def ask(path: Path, request: dict[str, Any], *, timeout_s: float = 30.0) -> dict[str, Any]:
    """Send a command to the launcher that owns the socket and return its answer.

    Raises:
        Unavailable: nobody listens there.
        Conflict: the launcher refused, with its reason.
    """
    try:
        with _address(path) as address, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.settimeout(timeout_s)
            connection.connect(address)
            connection.sendall(json.dumps(request).encode() + b"\n")
            with connection.makefile("rb") as file:
                answer = json.loads(file.readline() or b"{}")
    except (OSError, json.JSONDecodeError) as error:
        raise Unavailable(
            f"no `rlharvest up` runs on {path.parent}. Start one there, or name its directory with --data."
        ) from error
    if not answer.pop("ok", False):
        raise Conflict(answer.get("error", "the launcher gave no answer"))
    return dict(answer)
