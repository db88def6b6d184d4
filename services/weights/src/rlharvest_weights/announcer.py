"""Tells everyone over core NATS that a version exists.

Fire and forget: the truth is the list of versions, and who missed the message asks. Of each job only the newest version
waits while NATS is away, and publishing a version never waits for NATS.
"""

from __future__ import annotations

import asyncio
import ssl

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from rlharvest import bus
from rlharvest.accounts import Credential
from rlharvest.errors import Unavailable
from rlharvest.v1 import fleet_pb2
from rlharvest.weights.manifest import Manifest

from rlharvest_weights import metrics

log = structlog.get_logger(__name__)


class Announcer:
    """Sends VersionExists messages; `run` is a background task.

    Args:
        credential, tls: see bus.connect.
    """

    def __init__(
        self, nats_url: str, *, credential: Credential | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        self._nats_url = nats_url
        self._credential = credential
        self._tls = tls
        self._waiting: dict[str, Manifest] = {}
        self._news = asyncio.Event()

    def announce(self, manifest: Manifest) -> None:
        """Send as soon as NATS is there; never blocks, never fails."""
        if manifest.job in self._waiting:
            metrics.UNANNOUNCED.inc()
        self._waiting[manifest.job] = manifest
        self._news.set()

    async def run(self) -> None:
        """Connect, reconnect, send; for ever."""
        client = await self._connect()
        try:
            while True:
                await self._news.wait()
                self._news.clear()
                while self._waiting:
                    job, manifest = next(iter(self._waiting.items()))
                    try:
                        await self._send(client, manifest)
                    except (NatsError, OSError) as error:
                        log.info("announcement.waiting", job=job, version=manifest.version, error=repr(error))
                        await asyncio.sleep(0.5)
                        continue
                    if self._waiting.get(job) is manifest:
                        del self._waiting[job]
        finally:
            await client.close()

    async def _connect(self) -> Client:
        while True:
            try:
                return await bus.connect(self._nats_url, "weights", credential=self._credential, tls=self._tls)
            except Unavailable as error:
                log.warning("announcement.waiting", error=str(error))

    @staticmethod
    async def _send(client: Client, manifest: Manifest) -> None:
        message = fleet_pb2.VersionExists(
            job=manifest.job, version=manifest.version, step=manifest.step, digest=manifest.digest
        )
        await client.publish(bus.subject("version", manifest.job, "weights"), message.SerializeToString())
        await client.flush(timeout=2)
