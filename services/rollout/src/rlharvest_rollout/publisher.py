"""Publishes the buffer as TokenSpans, one message at a time.

Invariants: a message is repeated, with the same id and bytes, until its PubAck comes; the next one is made only then,
so spans reach the log in order; the process never gives up while it lives: what cannot be published waits in the
buffer, and a full buffer pauses generation. Flush numbers rise by one over the whole life of the process, whatever
job it serves: a number that came twice within the stream's window of duplicates would be swallowed in silence.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from rlharvest import bus
from rlharvest.errors import RlharvestError
from rlharvest.spans import Flush, Span, pack

from rlharvest_rollout import metrics
from rlharvest_rollout.buffer import Buffer

log = structlog.get_logger(__name__)

_PUBACK_TIMEOUT_S = 2.0
_RETRY_FIRST_S = 0.05
_RETRY_MOST_S = 2.0
_HEADROOM_BYTES = 4096
"""For subject, headers and the message's own fields."""


class FlushSwallowed(RlharvestError):
    """The stream took a flush for one that it had: its tokens would be lost."""


class Publisher:
    """Carries the tokens of one job and one incarnation to the log."""

    def __init__(
        self,
        nc: Client,
        buffer: Buffer,
        *,
        job: str,
        worker: str,
        incarnation: int,
        numbers: Iterator[int],
        flush_s: float,
        flush_tokens: int,
    ) -> None:
        """`numbers` gives the next flush number; all publishers of the process share it."""
        self.flushed = 0
        """Number of the last flush with a PubAck."""
        self.numerics_key = ""
        self._nc = nc
        self._js = nc.jetstream()
        self._buffer = buffer
        self._worker = worker
        self._incarnation = incarnation
        self._subject = bus.subject("spans", job, worker)
        self._flush_s = flush_s
        self._flush_tokens = flush_tokens
        self._numbers = numbers
        self._turn = asyncio.Lock()
        self._due = asyncio.Event()
        self._hurry = asyncio.Event()

    def notify(self) -> None:
        """There may be something to publish."""
        if self._buffer.unsent:
            self._due.set()
            if self._buffer.unsent_tokens >= self._flush_tokens:
                self._hurry.set()

    async def run(self) -> None:
        """Flush when tokens have waited long enough, or are many."""
        while True:
            await self._due.wait()
            try:
                async with asyncio.timeout(self._flush_s):
                    await self._hurry.wait()
            except TimeoutError:
                pass  # the usual case: few tokens, the time is over
            self._due.clear()
            self._hurry.clear()
            await self.flush()
            self.notify()

    async def flush(self) -> None:
        """Publish everything that is due; returns when all of it is durable."""
        async with self._turn:
            while spans := self._buffer.take(self._room()):
                await self._publish(spans)

    async def probe(self) -> None:
        """Ask for acknowledgements that are missing."""
        if self._turn.locked():
            return  # nothing was published meanwhile, so nothing can be missing
        async with self._turn:
            if spans := self._buffer.probe():
                metrics.PROBES.inc(len(spans))
                await self._publish(spans)

    async def finish(self) -> None:
        """Publish what is left, and that nothing of this incarnation follows."""
        async with self._turn:
            while True:
                spans = self._buffer.take(self._room())
                last = not self._buffer.unsent
                await self._publish(spans, final=last)
                if last:
                    return

    def _room(self) -> int:
        return min(self._nc.max_payload or bus.MAX_PAYLOAD_BYTES, bus.MAX_PAYLOAD_BYTES) - _HEADROOM_BYTES

    async def _publish(self, spans: list[Span], *, final: bool = False) -> None:
        number = next(self._numbers)
        payload = pack(
            Flush(
                worker=self._worker,
                incarnation=self._incarnation,
                number=number,
                spans=tuple(spans),
                final=final,
                numerics_key=self.numerics_key,
            )
        )
        await self._deliver(payload, f"{self._worker}.{self._incarnation}:{number}")
        self.flushed = number
        self._buffer.confirm(spans)
        metrics.FLUSHES.inc()
        metrics.BUFFERED.set(self._buffer.tokens)

    async def _deliver(self, payload: bytes, message_id: str) -> None:
        delay = _RETRY_FIRST_S
        failures = 0
        while True:
            # What is published while NATS is away would pile up in the client.
            if not self._nc.is_connected:
                await asyncio.sleep(_RETRY_FIRST_S)
                continue
            try:
                receipt = await self._js.publish(
                    self._subject,
                    payload,
                    timeout=_PUBACK_TIMEOUT_S,
                    stream=bus.LEDGER,
                    headers={"Nats-Msg-Id": message_id},
                )
            except (NatsError, TimeoutError, OSError) as error:
                failures += 1
                metrics.PUBLISH_FAILURES.labels(type(error).__name__).inc()
                if failures & (failures - 1) == 0:
                    log.warning("flush.failed", message=message_id, tries=failures, error=repr(error))
            else:
                if receipt.duplicate and not failures:
                    raise FlushSwallowed(f"the stream took flush {message_id} for one that it had")
                if failures:
                    log.info("flush.recovered", message=message_id, tries=failures + 1)
                return
            await asyncio.sleep(delay)
            delay = min(2 * delay, _RETRY_MOST_S)
