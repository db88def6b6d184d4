"""Health and metrics of a process that has no web server of its own: /livez, /readyz, /metrics on one small port.

/livez: the event loop turns. /readyz: every check passes, else 503 with the failing ones by name. /metrics: Prometheus.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable

import prometheus_client

from rlharvest.errors import InvalidField

Check = Callable[[], Awaitable[str | None]]
"""Returns None when all is well, else one sentence that says what is not."""


class Health:
    """Named readiness checks."""

    def __init__(self) -> None:
        self.checks: dict[str, Check] = {}

    async def failures(self, *, timeout_s: float = 2.0) -> dict[str, str]:
        """Run the checks; return the sentence of each that does not pass."""
        failed = {}
        for name, check in self.checks.items():
            try:
                async with asyncio.timeout(timeout_s):
                    problem = await check()
            except TimeoutError:
                problem = f"no answer in {timeout_s:g} s"
            except Exception as error:  # noqa: BLE001 - whatever a check raises is its finding
                problem = repr(error)
            if problem is not None:
                failed[name] = problem
        return failed


class HealthServer:
    """Serves a Health over HTTP/1.1, one request a connection."""

    def __init__(self, health: Health) -> None:
        self.health = health
        self.port = 0
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> None:
        """Listen; `port` 0 takes a free one, which `self.port` then names.

        Raises:
            InvalidField: the address cannot be listened on.
        """
        try:
            self._server = await asyncio.start_server(self._serve, host, port)
        except OSError as error:
            problem = error.strerror or str(error)
            fix = "Stop who uses it, or choose another; 0 takes a free one."
            raise InvalidField("RLHARVEST_HEALTH_PORT", f"{host}:{port}", problem, fix) from error
        self.port = self._server.sockets[0].getsockname()[1]

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(5):
                request = (await reader.readline()).decode("latin-1").split()
                while (await reader.readline()).strip():
                    pass
            path = request[1].partition("?")[0] if len(request) > 1 else ""
            status, kind, body = await self._answer(path)
            writer.write(
                f"HTTP/1.1 {status}\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}\r\n"
                "Connection: close\r\n\r\n".encode()
                + body
            )
            await writer.drain()
        except (TimeoutError, ConnectionError):
            pass  # the client went away
        finally:
            writer.close()

    async def _answer(self, path: str) -> tuple[str, str, bytes]:
        if path == "/livez":
            return "200 OK", "application/json", b'{"status": "ok"}'
        if path == "/readyz":
            failed = await self.health.failures()
            body = json.dumps({"status": "unready" if failed else "ok", "failed": failed}).encode()
            return "503 Service Unavailable" if failed else "200 OK", "application/json", body
        if path == "/metrics":
            return "200 OK", prometheus_client.CONTENT_TYPE_LATEST, prometheus_client.generate_latest()
        return "404 Not Found", "application/json", b'{"error": "paths: /livez, /readyz, /metrics"}'
