"""Messages of the LEDGER stream from a sequence on, as its reader asks for them.

A pull consumer without acknowledgements: what is on its way is bounded by what was asked for, so a reader that stands still
fills no memory. Invariants: at most one request is open, and the next one goes out as soon as the messages of the last have
been taken, so that they travel while those are worked on; a feed that cannot go on says so, and its reader opens a new one.
"""

from __future__ import annotations

import asyncio
import json

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.js import JetStreamContext
from nats.js.api import AckPolicy, ConsumerConfig, DeliverPolicy, Header
from rlharvest.errors import InfrastructureError

BATCH = 128
"""Most messages of one request."""

BATCH_BYTES = 8 << 20
"""Most bytes of one request; several times the largest message."""

EXPIRES_S = 30.0
"""A request that brought less than it may is made anew after so long."""

_INACTIVE_S = 60.0
"""The server forgets a feed that asked for nothing for so long."""

_OVER = ("Request Timeout", "Message Size Exceeds MaxBytes", "Batch Completed")
"""How a request ends when the feed goes on; everything else that the server says of one means that it does not."""


class FeedBroken(InfrastructureError):
    """The server sends no more to this reader: its consumer is gone."""


class Feed:
    """One consumer of a stream."""

    def __init__(self, nats: Client, js: JetStreamContext, stream: str) -> None:
        self._nats = nats
        self._js = js
        self._stream = stream
        self._consumer = ""
        self._inbox = nats.new_inbox()
        self._requests = 0
        self._subscription: Subscription | None = None
        self._messages: list[Msg] = []
        self._open = 0
        """Messages that the open request may still bring."""
        self._broken = ""
        self._changed = asyncio.Event()

    async def start(self, after: int) -> None:
        """Begin with the message after sequence `after`."""
        config = ConsumerConfig(
            deliver_policy=DeliverPolicy.BY_START_SEQUENCE,
            opt_start_seq=after + 1,
            ack_policy=AckPolicy.NONE,
            mem_storage=True,
            inactive_threshold=_INACTIVE_S,
        )
        self._consumer = (await self._js.add_consumer(self._stream, config=config)).name
        self._subscription = await self._nats.subscribe(f"{self._inbox}.*", cb=self._heard)
        await self._ask()

    async def next(self, timeout_s: float) -> list[Msg]:
        """Wait for messages; return all there are, in order.

        Raises:
            TimeoutError: none came.
            FeedBroken: none will come.
        """
        async with asyncio.timeout(timeout_s):
            while not self._messages:
                if self._broken:
                    raise FeedBroken(self._broken)
                await self._ask()
                self._changed.clear()
                await self._changed.wait()
        await self._ask()
        messages, self._messages = self._messages, []
        return messages

    async def close(self) -> None:
        """Stop; the server forgets the consumer at once, or when nothing was asked of it for a while."""
        if self._subscription is not None:
            await self._subscription.unsubscribe()
        if self._consumer and not self._broken and self._nats.is_connected:
            await self._js.delete_consumer(self._stream, self._consumer)

    async def _ask(self) -> None:
        if self._open > 0 or self._broken:
            return
        self._open = BATCH
        self._requests += 1
        request = {"batch": BATCH, "max_bytes": BATCH_BYTES, "expires": int(EXPIRES_S * 1e9)}
        await self._nats.publish(
            f"$JS.API.CONSUMER.MSG.NEXT.{self._stream}.{self._consumer}",
            json.dumps(request).encode(),
            reply=f"{self._inbox}.{self._requests}",
        )

    async def _heard(self, message: Msg) -> None:
        headers = message.headers or {}
        if message.subject.startswith(self._inbox):
            description = headers.get(Header.DESCRIPTION, "")
            if description not in _OVER:
                self._broken = f"{headers.get(Header.STATUS)} {description}"
            elif message.subject == f"{self._inbox}.{self._requests}":
                self._open = 0
        else:
            self._messages.append(message)
            self._open -= 1
        self._changed.set()
