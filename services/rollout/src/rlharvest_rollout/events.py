"""What a worker tells people: events on the bus. A lost one is logged and counted, and changes nothing else."""

from __future__ import annotations

import json
import time
from typing import Any

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from rlharvest import bus
from rlharvest.ids import new_id
from rlharvest.v1 import events_pb2

from rlharvest_rollout import metrics

log = structlog.get_logger(__name__)

_PUBACK_TIMEOUT_S = 2.0


class Events:
    """Events of one worker."""

    def __init__(self, nc: Client, worker: str) -> None:
        self._nc = nc
        self._worker = worker

    async def tell(self, job: str, level: str, kind: str, message: str, data: dict[str, Any]) -> None:
        """Publish an event; never raises for a bus that does not take it."""
        event = events_pb2.Event(
            id=new_id("evt"),
            job=job,
            level=level,
            type=kind,
            message=message,
            data_json=json.dumps({"worker": self._worker, **data}),
            at=time.time(),
            source=self._worker,
        )
        try:
            await self._nc.jetstream().publish(
                bus.subject("events", job, self._worker),
                event.SerializeToString(),
                timeout=_PUBACK_TIMEOUT_S,
                headers={"Nats-Msg-Id": event.id},
            )
        except (NatsError, TimeoutError, OSError) as error:
            metrics.PUBLISH_FAILURES.labels("event").inc()
            log.warning("event.failed", type=kind, error=repr(error))
