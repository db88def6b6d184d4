"""One publishing process of the ingest benchmark: simulated workers with the flush structure of the real one.

Every worker has one flush on its way at a time and makes the next when the PubAck of JetStream is there, with the same
call and headers as rlharvest_rollout.publisher. The messages are built before the clock starts. A worker is done when
LedgerAcks cover every token of it.
"""

from __future__ import annotations

import asyncio
import sys
import time
from dataclasses import dataclass, field
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.v1 import spans_pb2

from benchmarks.ingest import control
from benchmarks.ingest.load import Load, share


@dataclass(slots=True)
class Worker:
    """One simulated worker."""

    name: str
    payloads: list[bytes]
    tokens: int
    lengths: dict[int, int] = field(default_factory=dict)
    """handle -> tokens that a LedgerAck has covered."""
    acknowledged: int = 0
    done: asyncio.Event = field(default_factory=asyncio.Event)

    def hear(self, ack: spans_pb2.LedgerAck) -> None:
        for handle, length in zip(ack.handle, ack.length, strict=True):
            self.acknowledged += length - self.lengths.get(handle, 0)
            self.lengths[handle] = length
        if self.acknowledged >= self.tokens:
            self.done.set()


class Publisher:
    """The workers of one process, in one job after another."""

    def __init__(self, nats: Client, index: int, of: int) -> None:
        self.nats = nats
        self.js = nats.jetstream()
        self.index = index
        self.of = of
        self.load = Load("", 0)
        self.workers: list[Worker] = []

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what the benchmark asks."""
        match request["do"]:
            case "prepare":
                self.load = Load(**request["load"])
                self.workers = [
                    Worker(self.load.worker(index), list(self.load.payloads(index)), self.load.tokens)
                    for index in share(self.load.workers, self.of, self.index)
                ]
            case "publish":
                return await self.publish()
        return {}

    async def publish(self) -> dict[str, Any]:
        """Publish everything; return when it began and when all of it was acknowledged, on the monotonic clock."""
        subscriptions = [
            await self.nats.subscribe(bus.subject("acks", self.load.job, worker.name), cb=self._hear(worker))
            for worker in self.workers
        ]
        await self.nats.flush()
        start = time.monotonic()
        await asyncio.gather(*(self._publish(worker) for worker in self.workers))
        await asyncio.gather(*(worker.done.wait() for worker in self.workers))
        end = time.monotonic()
        for subscription in subscriptions:
            await subscription.unsubscribe()
        return {"start": start, "end": end, "cpu": time.process_time()}

    def _hear(self, worker: Worker) -> Any:
        async def heard(message: Msg) -> None:
            worker.hear(spans_pb2.LedgerAck.FromString(message.data))

        return heard

    async def _publish(self, worker: Worker) -> None:
        subject = bus.subject("spans", self.load.job, worker.name)
        for number, payload in enumerate(worker.payloads, 1):
            await self.js.publish(
                subject,
                payload,
                timeout=30,
                stream=bus.LEDGER,
                headers={"Nats-Msg-Id": f"{worker.name}.1:{number}"},
            )


async def main(url: str, index: int, of: int) -> None:
    """Serve the benchmark until it asks to stop."""
    nats = await bus.connect(url, f"publisher/{index}")
    await control.serve(nats, f"publisher.{index}", Publisher(nats, index, of).answer)
    await nats.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3])))
