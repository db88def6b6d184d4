"""The trainer on the bus: wake-ups when a group is complete, and events for people.

Neither is the truth of anything: a lost wake-up costs one poll, a lost event is logged and counted.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal, Protocol

import structlog
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from rlharvest import bus
from rlharvest.ids import new_id
from rlharvest.v1 import events_pb2

from rlharvest_trainer import metrics

log = structlog.get_logger(__name__)

Level = Literal["info", "warn", "error"]


class Notices(Protocol):
    """What a run needs of the bus."""

    def wakeups(self, job: str) -> Any:
        """Return an async context manager that gives an asyncio.Event, set when a group of the job is complete."""
        ...

    async def event(self, job: str, level: Level, kind: str, message: str, data: Mapping[str, Any]) -> None:
        """Tell people; never raises."""
        ...


class BusNotices:
    """Notices over NATS.

    Args:
        source: name of this trainer, as events carry it.
    """

    def __init__(self, client: Client, source: str) -> None:
        self._client = client
        self._js = client.jetstream(timeout=5)
        self._source = source

    @asynccontextmanager
    async def wakeups(self, job: str) -> AsyncIterator[asyncio.Event]:
        """See Notices. What is stored in the stream is also delivered live, which is all that a wake-up needs."""
        woken = asyncio.Event()

        async def wake(_message: Msg) -> None:
            woken.set()

        subscription = await self._client.subscribe(bus.subject("groups", job, "coordinator"), cb=wake)
        try:
            yield woken
        finally:
            if not self._client.is_closed:
                await subscription.unsubscribe()

    async def event(self, job: str, level: Level, kind: str, message: str, data: Mapping[str, Any]) -> None:
        """See Notices."""
        event = events_pb2.Event(
            id=new_id("evt"),
            job=job,
            level=level,
            type=kind,
            message=message,
            data_json=json.dumps(dict(data)),
            at=time.time(),
            source=self._source,
        )
        try:
            await self._js.publish(
                bus.subject("events", job, self._source), event.SerializeToString(), headers={"Nats-Msg-Id": event.id}
            )
        except (NatsError, TimeoutError, OSError) as error:
            metrics.EVENTS_LOST.inc()
            log.warning("event.lost", type=kind, message=message, error=repr(error))
