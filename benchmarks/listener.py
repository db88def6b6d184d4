"""A client of the bus in a thread of its own, for as long as a benchmark lasts.

Invariants: what is said after `with` was entered is heard; when it is left, nothing more is.
"""

from __future__ import annotations

import asyncio
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from nats.aio.client import Client
from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.errors import Unavailable
from rlharvest.testing.servers import NatsServer


class Listener(ABC):
    """Hears the messages of some subjects.

    Args:
        name: of the client and of the thread.
        subjects: as NATS takes them, with wildcards.
    """

    def __init__(self, server: NatsServer, name: str, subjects: Sequence[str]) -> None:
        self._server = server
        self._name = name
        self._subjects = subjects
        self._loop: asyncio.AbstractEventLoop | None = None
        self._nats: Client | None = None
        self._end = asyncio.Event()
        self._listening = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._listen()), name=name, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        if not self._listening.wait(15):
            raise Unavailable(f"NATS does not answer at {self._server.url}")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(15)

    async def _listen(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._nats = await bus.connect(self._server.url, self._name, timeout_s=10, credential=self._server.credential)
        for subject in self._subjects:
            await self._nats.subscribe(subject, cb=self._hear)
        await self._nats.flush()
        self._listening.set()
        await self._end.wait()
        await self._nats.close()

    @abstractmethod
    async def _hear(self, message: Msg) -> None:
        """Take a message in; runs in the thread."""
