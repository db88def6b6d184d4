"""What passes on the bus, heard for benchmarks.chaos: kept for a while to be said again, and counted as progress.

A message that is said again has the bytes and the subject that it had, but no Msg-Id: to the stream it is another
message, so nothing but the services themselves can tell that they know it.

Invariants: what this module says is neither kept nor counted; only tokens beyond those heard before are progress.
"""

from __future__ import annotations

import asyncio
import bisect
import itertools
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from google.protobuf.message import DecodeError
from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.errors import CorruptData
from rlharvest.spans import unpack
from rlharvest.testing.servers import NatsServer
from rlharvest.v1 import ledger_pb2

from benchmarks.listener import Listener

KEPT = 20_000
LATE_S = 5.0
"""A late message is at least this old."""

_MARK = {"Rlharvest-Echo": "1"}


@dataclass(frozen=True, slots=True)
class Heard:
    """A message."""

    at: float
    subject: str
    data: bytes


class Echo(Listener):
    """Listens in a thread of its own until it is closed."""

    def __init__(self, server: NatsServer) -> None:
        super().__init__(server, "echo", ["rlharvest.v1.>"])
        self.retired = 0
        """Groups that were complete and left the ledger."""
        self.tokens: list[float] = []
        """When new tokens passed, by time.monotonic, rising."""
        self._messages: deque[Heard] = deque(maxlen=KEPT)
        self._lengths: dict[tuple[str, int], int] = {}

    def duplicate(self, n: int) -> int:
        """Say the last `n` messages again; return how many there were."""
        return self._say(list(self._messages)[-n:])

    def late(self, n: int) -> int:
        """Say `n` messages again that are old by now, spread over all that are kept; return how many there were."""
        old = [heard for heard in list(self._messages) if heard.at < time.monotonic() - LATE_S]
        return self._say(old[:: max(1, len(old) // n)][:n])

    def _say(self, messages: Sequence[Heard]) -> int:
        assert self._loop is not None, "the echo was not started"
        asyncio.run_coroutine_threadsafe(self._publish(messages), self._loop).result(10)
        return len(messages)

    async def _publish(self, messages: Sequence[Heard]) -> None:
        assert self._nats is not None, "set before anybody is told that it listens"
        for heard in messages:
            await self._nats.publish(heard.subject, heard.data, headers=dict(_MARK))

    async def _hear(self, message: Msg) -> None:
        if message.headers and "Rlharvest-Echo" in message.headers:
            return
        at = time.monotonic()
        self._messages.append(Heard(at, message.subject, message.data))
        kind, job, _ = bus.parse_subject(message.subject)
        try:
            if kind == "spans":
                self._progress(at, job, message.data)
            elif kind == "ledger":
                changes = ledger_pb2.Transition.FromString(message.data).changes
                self.retired += sum(change.HasField("retire") for change in changes)
        except (CorruptData, DecodeError):
            pass  # half a message of somebody who was killed: the services count it

    def _progress(self, at: float, job: str, data: bytes) -> None:
        fresh = False
        for span in unpack(data).spans:
            key = (job, span.handle)
            fresh = fresh or span.end > self._lengths.get(key, 0)
            self._lengths[key] = max(span.end, self._lengths.get(key, 0))
        if fresh:
            self.tokens.append(at)


def stalls(faults: Sequence[float], tokens: Sequence[float], end: float) -> list[float]:
    """Return for each fault the longest time without a new token that begins, or goes on, between it and the next one.

    Args:
        faults: when they were made, rising.
        tokens: when new tokens passed, rising.
        end: of the run.
    """
    found = []
    for index, start in enumerate(faults):
        following = faults[index + 1] if index + 1 < len(faults) else end
        first, last = bisect.bisect_left(tokens, start), bisect.bisect_left(tokens, following)
        # The silence in which the next fault falls counts to its own end.
        marks = [start, *tokens[first : last + 1]]
        if last >= len(tokens):
            marks.append(end)
        found.append(max(after - before for before, after in itertools.pairwise(marks)))
    return found
