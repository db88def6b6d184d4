"""A TCP proxy that loses the network without telling anyone: what a cable, a switch or a firewall does.

It stands between one client and one server. In a black hole nothing is forwarded and nothing is closed: neither side
hears that the other is gone. What was on its way is delivered when the hole ends, as TCP does it, even if the other side
of that connection has given up meanwhile: so a server sees late messages of a client that already speaks again.

Invariants: bytes are forwarded in order or not at all; nothing is changed; the proxy lives in a thread of its own, so a
test that waits does not stop it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import TracebackType
from urllib.parse import urlsplit

from rlharvest.errors import Unavailable
from rlharvest.testing.servers import free_port

_BLOCK = 1 << 16


class Proxy:
    """Forwards 127.0.0.1:port to where a URL points, until told otherwise."""

    def __init__(self, url: str) -> None:
        self._target = urlsplit(url)
        self.port = free_port()
        self.delay_s = 0.0
        """Each block of bytes waits this long, in each direction."""
        self._loop: asyncio.AbstractEventLoop | None = None
        self._open = asyncio.Event()
        self._open.set()
        self._end = asyncio.Event()
        self._listening = threading.Event()
        self._connections: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), name="proxy", daemon=True)

    @property
    def url(self) -> str:
        """The URL with this proxy in the place of the server."""
        user, at, _ = self._target.netloc.rpartition("@")
        return self._target._replace(netloc=f"{user}{at}127.0.0.1:{self.port}").geturl()

    def start(self) -> Proxy:
        """Listen."""
        self._thread.start()
        if not self._listening.wait(15):
            raise Unavailable(f"the proxy does not listen on port {self.port}")
        return self

    def stop(self) -> None:
        """Close everything."""
        self._call(self._end.set)
        self._thread.join(15)

    def __enter__(self) -> Proxy:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def swallow(self) -> None:
        """Forward nothing from now on, and close nothing."""
        self._call(self._open.clear)

    def forward(self) -> None:
        """Forward again, beginning with what was on its way."""
        self._call(self._open.set)

    def drop(self) -> None:
        """Close every connection there is; new ones are forwarded."""
        self._call(lambda: [task.cancel() for task in self._connections])

    def _call(self, what: Callable[[], object]) -> None:
        assert self._loop is not None, "the proxy was not started"
        self._loop.call_soon_threadsafe(what)

    async def _run(self) -> None:
        self._loop = asyncio.get_running_loop()
        server = await asyncio.start_server(self._accept, "127.0.0.1", self.port)
        self._listening.set()
        async with server:
            await self._end.wait()
        for task in list(self._connections):
            task.cancel()
        await asyncio.gather(*self._connections, return_exceptions=True)

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._connections.add(task)
        try:
            await self._carry(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass  # one side is gone, or the proxy ends; both sides see a closed connection
        finally:
            self._connections.discard(task)
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await self._open.wait()
        there, back = await asyncio.open_connection(self._target.hostname, self._target.port)
        try:
            ways = [asyncio.create_task(self._pump(reader, back)), asyncio.create_task(self._pump(there, writer))]
            try:
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                # What one side had said before it closed still reaches the other.
                await asyncio.wait(ways, timeout=0.2)
            finally:
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
        finally:
            back.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        while data := await source.read(_BLOCK):
            await asyncio.sleep(self.delay_s)
            await self._open.wait()
            sink.write(data)
            await sink.drain()
