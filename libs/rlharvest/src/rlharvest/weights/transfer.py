"""HTTP connections of bulk transfers: one a thread, kept alive, all of them closed from outside to cancel.

The standard library's client reads straight into a buffer, which is several times faster than the asynchronous ones; so
bytes move in threads, and this module is what those threads share.
"""

from __future__ import annotations

import asyncio
import http.client
import socket
import threading
import time
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from rlharvest.credentials import Caller
from rlharvest.errors import InvalidField, RlharvestError, Unavailable

Result = TypeVar("Result")

TRANSIENT = (OSError, http.client.HTTPException)
"""What a connection raises when the network or the server fails; asking again may help."""

BLOCK_BYTES = 1 << 20
"""Bytes between two looks at whether the transfer was cancelled."""


class Cancelled(RlharvestError):
    """The transfer was cancelled."""


class Transfer:
    """The connections to one server and the time limit that all its requests share.

    Args:
        base_url: http(s)://host:port, optionally with a path before /v1.
        timeout_s: a socket that stands still for this long has failed.
        total_s: time limit of everything that goes through this object.
        caller: how this process shows itself, and whom it believes.
    """

    def __init__(self, base_url: str, *, timeout_s: float, total_s: float, caller: Caller | None = None) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise InvalidField("weights_url", base_url, "not an HTTP address", "Give one such as http://127.0.0.1:7083")
        self.base_url = base_url
        self.prefix = parts.path.rstrip("/")
        self.timeout_s = timeout_s
        self.total_s = total_s
        self.caller = caller or Caller()
        self._encrypted = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port
        self._end = time.monotonic() + total_s
        self._cancelled = threading.Event()
        self._lock = threading.Lock()
        self._open: dict[int, http.client.HTTPConnection] = {}

    def connection(self) -> http.client.HTTPConnection:
        """Return this thread's connection."""
        self.check()
        thread = threading.get_ident()
        with self._lock:
            if thread not in self._open:
                self._open[thread] = self._connect()
            return self._open[thread]

    def _connect(self) -> http.client.HTTPConnection:
        if self._encrypted:
            context = self.caller.tls.client
            return http.client.HTTPSConnection(self._host, self._port, timeout=self.timeout_s, context=context)
        return http.client.HTTPConnection(self._host, self._port, timeout=self.timeout_s)

    def drop(self) -> None:
        """Close this thread's connection; what is left of its reply is of no use."""
        with self._lock:
            connection = self._open.pop(threading.get_ident(), None)
        if connection is not None:
            connection.close()

    def check(self, problem: object = "the transfer is too slow") -> None:
        """Raise Cancelled if `cancel` was called, Unavailable if the time limit is over."""
        if self._cancelled.is_set():
            raise Cancelled
        if time.monotonic() >= self._end:
            raise Unavailable(f"the weight service at {self.base_url} did not serve in {self.total_s:g} s: {problem}")

    def pause(self, tries: int, problem: object) -> None:
        """Wait before the next try: 0.05 s, doubled each time, at most 2 s; then `check`."""
        wait = min(0.05 * 2 ** min(tries, 6), 2.0)
        self._cancelled.wait(max(0.0, min(wait, self._end - time.monotonic())))
        self.check(problem)

    def cancel(self) -> None:
        """End every request now: threads that wait for bytes wake with an error."""
        self._cancelled.set()
        with self._lock:
            connections = list(self._open.values())
        for connection in connections:
            held = connection.sock
            if held is not None:
                try:
                    held.shutdown(socket.SHUT_RDWR)
                except OSError:
                    pass  # it is closed already

    def close(self) -> None:
        """Close every connection; no thread may use one any more."""
        with self._lock:
            connections, self._open = list(self._open.values()), {}
        for connection in connections:
            connection.close()


async def in_thread(work: Callable[[], Result], transfer: Transfer) -> Result:
    """Run `work`, which uses `transfer`, in a thread. When this call is cancelled, cancel it and wait for its end."""
    task = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        transfer.cancel()
        await asyncio.wait([task])
        if not task.cancelled():
            task.exception()  # retrieved: it is the cancellation
        raise
    finally:
        if task.done():
            transfer.close()


class Progress:
    """Counts bytes from many threads and tells the event loop, at most ten times a second and once at the end.

    Args:
        callback: called on the event loop with (bytes done, bytes in all).
    """

    def __init__(self, total: int, callback: Callable[[int, int], None] | None) -> None:
        self.total = total
        self.done = 0
        self._callback = callback
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self._told = 0.0

    def add(self, count: int) -> None:
        """Count bytes; negative when some turned out to be of no use."""
        with self._lock:
            self.done += count
            now = time.monotonic()
            if self._callback is None or (now - self._told < 0.1 and self.done < self.total):
                return
            self._told = now
            self._loop.call_soon_threadsafe(self._callback, self.done, self.total)
