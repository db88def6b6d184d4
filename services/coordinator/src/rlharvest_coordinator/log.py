"""The LEDGER stream as the coordinator reads and writes it: every message once, in order, from a sequence on.

Invariants: `read` yields the stream's messages without a gap, in order of sequence, whatever NATS does in between (restarts,
reconnects, a consumer that is gone); a stream that is new or was emptied is found by its identity, one that lost its tail
by what it holds at the place that was read last; a transition is published
until NATS says that it is durable, under one Msg-Id, so that it is in the log once.
"""

from __future__ import annotations

import asyncio
import zlib
from dataclasses import dataclass

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js import JetStreamContext
from nats.js.api import StreamInfo
from nats.js.errors import APIError, NotFoundError
from rlharvest.bus import LEDGER, MAX_PAYLOAD_BYTES, ensure_streams, parse_subject, subject
from rlharvest.v1 import ledger_pb2

from rlharvest_coordinator import obstacles
from rlharvest_coordinator.feed import Feed, FeedBroken
from rlharvest_coordinator.obstacles import Obstacle

log = structlog.get_logger(__name__)

IDLE_S = 1.0
"""Without a message for this long, look whether the stream has any that did not come."""


class StreamChanged(Exception):
    """The stream is another one than before: new, emptied, or without its tail."""

    def __init__(self, identity: str) -> None:
        self.identity = identity
        super().__init__(f"the ledger's stream is now {identity}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One message of the log."""

    sequence: int
    kind: str
    job: str
    who: str
    data: bytes

    @property
    def mark(self) -> int:
        """Digest of the message, never 0."""
        return zlib.crc32(self.data) or 1


class Log:
    """The stream, seen by one coordinator."""

    def __init__(self, nats: Client) -> None:
        self.nats = nats
        self.js: JetStreamContext = nats.jetstream(timeout=3)
        self.obstacle: Obstacle | None = None
        """Set while the stream is full."""
        self.identity = ""
        """Of the stream that is read: the time of its creation."""
        self.delivered = 0
        """Sequence of the last message that `read` returned."""
        self._mark = 0
        """Digest of that message; 0: not known."""
        self._feed: Feed | None = None

    async def open(self) -> StreamInfo:
        """Create the streams where they are missing and take note of the ledger's identity."""
        info = (await ensure_streams(self.js))[LEDGER]
        self.identity = _identity(info)
        return info

    async def holds(self, sequence: int, mark: int) -> bool:
        """Whether the stream has, or had and purged, the message with this digest at this sequence."""
        state = (await self.js.stream_info(LEDGER)).state
        if state.last_seq < sequence:
            return False
        if not mark or sequence < state.first_seq:
            return True
        try:
            message = await self.js.get_msg(LEDGER, seq=sequence)
        except NotFoundError:
            return True  # purged meanwhile
        return (zlib.crc32(message.data or b"") or 1) == mark

    async def replace(self) -> StreamInfo:
        """Begin a new stream: the old one lost messages that were read, and has given their numbers to others since."""
        await self.js.delete_stream(LEDGER)
        return await self.open()

    async def start(self, after: int, mark: int = 0) -> None:
        """Read from the message after sequence `after`, whose digest is `mark`, on."""
        await self._leave()
        self.delivered, self._mark = after, mark
        feed = Feed(self.nats, self.js, LEDGER)
        await feed.start(after)
        self._feed = feed

    async def read(self) -> list[Entry]:
        """Wait for messages; return all there are, within the bounds of a feed; an empty list after a second without any.

        Raises:
            StreamChanged: the stream is another one; call `open` and `start` again.
        """
        entries: list[Entry] = []
        try:
            if self._feed is None:
                await self.start(self.delivered, self._mark)
            assert self._feed is not None
            for message in await self._feed.next(IDLE_S):
                sequence = message.metadata.sequence.stream
                if sequence <= self.delivered:
                    continue
                if sequence != self.delivered + 1 and not await self._purged_to(sequence):
                    log.warning("log.gap", expected=self.delivered + 1, got=sequence)
                    await self._leave()
                    break
                kind, job, who = parse_subject(message.subject)
                entries.append(Entry(sequence, kind, job, who, message.data))
                self.delivered = sequence
        except FeedBroken as broken:
            log.info("log.resubscribing", after=self.delivered, reason=str(broken))
            await self._leave()
        except (TimeoutError, NatsError, APIError) as error:
            if not entries:
                await self._check(error)
        if entries:
            self._mark = entries[-1].mark
        return entries

    async def publish(self, job: str, transition: ledger_pb2.Transition) -> int:
        """Put a transition into the log; return its sequence. Tries until NATS has it."""
        headers = {"Nats-Msg-Id": f"{job}:{transition.epoch}:{transition.number}"}
        data = transition.SerializeToString()
        delay = 0.05
        while True:
            try:
                acknowledged = await self.js.publish(subject("ledger", job), data, headers=headers, stream=LEDGER)
            except (TimeoutError, NatsError, APIError) as error:
                self.obstacle = obstacles.of_stream(error)
                log.warning("log.publish_failed", job=job, error=repr(error))
            else:
                self.obstacle = None
                return acknowledged.seq
            await asyncio.sleep(delay)
            delay = min(2 * delay, 1.0)

    async def measure(self) -> None:
        """Take note of whether the stream has room for a message."""
        info = await self.js.stream_info(LEDGER)
        most = info.config.max_bytes or -1
        full = 0 <= most < info.state.bytes + MAX_PAYLOAD_BYTES
        self.obstacle = obstacles.stream_full(f"{info.state.bytes} of {most} bytes") if full else None

    async def purge(self, below: int) -> None:
        """Delete messages with a sequence under `below`: the ledger has applied them, durably."""
        await self.js.purge_stream(LEDGER, seq=below)

    async def close(self) -> None:
        await self._leave()

    async def _check(self, error: Exception) -> None:
        """After a silent second: is the stream still the one, and did anything not come?"""
        try:
            info = (await ensure_streams(self.js))[LEDGER]
            identity = _identity(info)
            same = identity == self.identity and await self.holds(self.delivered, self._mark)
        except (TimeoutError, NatsError, APIError) as problem:
            log.warning("log.unreachable", error=repr(problem))
            await asyncio.sleep(0.2)
            return
        if not same:
            await self._leave()
            raise StreamChanged(identity) from error
        if info.state.last_seq > self.delivered:
            log.info("log.resubscribing", after=self.delivered, last=info.state.last_seq)
            await self._leave()

    async def _purged_to(self, sequence: int) -> bool:
        """Whether what lies before `sequence` is not in the stream any more."""
        return (await self.js.stream_info(LEDGER)).state.first_seq >= sequence

    async def _leave(self) -> None:
        feed, self._feed = self._feed, None
        if feed is not None:
            try:
                await feed.close()
            except (TimeoutError, NatsError, APIError):
                pass  # it is gone with its server


def _identity(info: StreamInfo) -> str:
    assert info.created is not None, "every stream was created once"
    return info.created.isoformat()
