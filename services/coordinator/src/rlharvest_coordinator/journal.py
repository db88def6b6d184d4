"""The journal of all jobs: keeps in SQL what this coordinator and other services say of them.

Invariants: a message of another service is acknowledged only after it is in SQL; one that is no event is counted and
goes; an event that comes twice is kept once (store.events).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.js.errors import APIError
from rlharvest.bus import EVENTS, parse_subject, subject
from rlharvest.clock import Clock
from rlharvest.errors import CorruptData
from rlharvest.ids import new_id
from rlharvest.v1 import events_pb2

from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import events

log = structlog.get_logger(__name__)


class Journal:
    """Writes events."""

    def __init__(self, nats: Client, sessions: Sessions, clock: Clock) -> None:
        self.nats = nats
        self.sessions = sessions
        self.clock = clock
        self.corrupt = 0
        """Messages on the subjects of events that were none."""

    async def write(self, job: str, level: str, kind: str, message: str, data: Mapping[str, Any] | None = None) -> None:
        """Keep an event of this coordinator's own."""
        item = events.NewEvent(
            id=new_id("evt"),
            job=job,
            level=level,
            type=kind,
            message=message,
            at=self.clock.time(),
            source="coordinator",
            data=dict(data or {}),
        )
        await events.append(self.sessions, [item])

    async def run(self) -> None:
        """Keep in SQL what other services say of jobs."""
        js = self.nats.jetstream(timeout=3)
        subscription = await js.pull_subscribe(subject("events", "*", "*"), durable="coordinator", stream=EVENTS)
        while True:
            try:
                messages = await subscription.fetch(64, timeout=0.5)
            except TimeoutError:
                continue
            except APIError as error:
                log.warning("events.resubscribing", error=repr(error))
                await asyncio.sleep(0.5)
                return
            fresh = []
            for message in messages:
                _, job, source = parse_subject(message.subject)
                try:
                    event = events_pb2.Event.FromString(message.data)
                    fresh.append(events.NewEvent.from_message(event, job=job, source=source))
                except (CorruptData, DecodeError) as error:
                    self.corrupt += 1
                    log.warning("events.corrupt", subject=message.subject, error=str(error))
            await events.append(self.sessions, fresh)
            for message in messages:
                await message.ack()
