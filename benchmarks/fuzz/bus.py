"""NATS: every subject gets what nobody should publish, under every name, and what was published before once more.

Two publishers. A worker with a credential of its own publishes anything anywhere: the server lets its own subjects through
and the ledger must take nothing from it that is not its own. A publisher that may do everything sends what does not verify:
garbage, messages cut or with bits turned over, epochs that cannot be, and real messages again, doubled and out of order.
Orders that verify are left out: whoever may write as the coordinator is the coordinator.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from google.protobuf.message import DecodeError, Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from rlharvest import bus
from rlharvest.grants import ROUTES, grant
from rlharvest.ledger.record import MAX_GROUP
from rlharvest.ledger.response import MAX_EPOCH
from rlharvest.testing.system import System
from rlharvest.v1 import batches_pb2, events_pb2, fleet_pb2, ledger_pb2, scores_pb2, spans_pb2

from benchmarks.fuzz.calls import STRANGER, Target
from benchmarks.fuzz.messages import broken, drawn, garbage, messages, varint
from benchmarks.fuzz.still import UNKNOWN

MESSAGES: dict[bus.Kind, type[Message]] = {
    "spans": spans_pb2.TokenSpans,
    "ledger": ledger_pb2.Transition,
    "score": scores_pb2.ScoreRequest,
    "scored": scores_pb2.ScoreResult,
    "events": events_pb2.Event,
    "groups": batches_pb2.GroupComplete,
    "acks": spans_pb2.LedgerAck,
    "resend": spans_pb2.Resend,
    "lease": fleet_pb2.Lease,
    "assign": fleet_pb2.Assignments,
    "abort": fleet_pb2.Abort,
    "rejoin": fleet_pb2.Rejoin,
    "drain": fleet_pb2.DrainOrder,
    "beat": fleet_pb2.Heartbeat,
    "version": fleet_pb2.VersionExists,
}
"""What goes over each kind of subject."""

NAMES = (STRANGER, "coordinator", "reward", "a$b", "x" * 300, "ä", "*")
"""Last tokens of subjects."""

Publish = Callable[[str, bytes], Awaitable[None]]


@dataclass(slots=True)
class Traffic:
    """Real messages of a job, by kind of subject: what was published while one ran."""

    heard: list[tuple[str, bytes]] = field(default_factory=list)

    async def hear(self, message: Msg) -> None:
        """Keep a message; replies and the stream's own subjects are not ours."""
        if message.subject.startswith("rlharvest.v1.") and len(self.heard) < 5000:
            self.heard.append((message.subject, message.data))

    def of(self, kind: str) -> list[bytes]:
        """Return what was published on subjects of a kind."""
        return [data for subject, data in self.heard if bus.parse_subject(subject)[0] == kind]


def commands(kind: bus.Kind, data: bytes, who: str, target: Target) -> bool:
    """Whether a message verifies, so that it is a real order or report from whoever may send it."""
    try:
        message: Any = MESSAGES[kind].FromString(data)
    except DecodeError:
        return False
    match kind:
        case "ledger":
            admits = (change.admit.n for change in message.changes if change.HasField("admit"))
            return who == "coordinator" and 0 < message.epoch <= MAX_EPOCH and all(n <= MAX_GROUP for n in admits)
        case "scored":
            return who == "reward" and bool(message.job == target.job)
        case "spans":
            return bool(message.worker == who and who == target.worker)
        case "lease" | "assign" | "abort":
            return who == target.worker and _obeyed(message, target)
        case "rejoin" | "drain" | "acks":
            return who == target.worker and bool(message.incarnation == target.incarnation)
        case "resend":
            return bool(message.epoch <= MAX_EPOCH)
        case "beat":
            return bool(message.worker == who == target.worker)
        case "score":
            return bool(message.job == target.job)  # the answer to another question would be taken
        case _:
            return False


def _obeyed(message: Any, target: Target) -> bool:
    return bool(message.incarnation == target.incarnation and message.epoch <= MAX_EPOCH)


def epochs(target: Target) -> Iterator[tuple[str, bytes]]:
    """Yield messages with everything right but an epoch that cannot be: obeyed once, it would fence off every real one."""
    for epoch in (2**32, 2**63, 2**64 - 1):
        begin = ledger_pb2.Change(begin=ledger_pb2.Begin())
        end = ledger_pb2.Change(end=ledger_pb2.End(reason="fuzz"))
        transition = ledger_pb2.Transition(epoch=epoch, number=1, changes=[begin, end])
        yield bus.subject("ledger", target.job), transition.SerializeToString()
        own: dict[str, Any] = {"epoch": epoch, "incarnation": target.incarnation}
        orders: list[tuple[Literal["lease", "assign", "abort", "resend", "rejoin"], Message]] = [
            ("lease", fleet_pb2.Lease(**own, job=target.job, engine="stub")),
            ("assign", fleet_pb2.Assignments(**own)),
            ("abort", fleet_pb2.Abort(**own)),
            ("rejoin", fleet_pb2.Rejoin(**own)),
        ]
        for kind, order in orders:
            job = bus.NO_JOB if kind == "rejoin" else target.job
            yield bus.subject(kind, job, target.worker), order.SerializeToString()
        yield bus.subject("resend", target.job), spans_pb2.Resend(epoch=epoch).SerializeToString()
    for attempt in (2**64 - 1, 2**63):
        one = fleet_pb2.Assignment(handle=0, attempt=attempt, budget=4, prompt=b"\0" * 4)
        order = fleet_pb2.Assignments(epoch=1, incarnation=target.incarnation, assignments=[one])
        yield bus.subject("assign", target.job, target.worker), order.SerializeToString()


class Bus:
    """Publishes to a running system."""

    def __init__(self, system: System, target: Target, *, seed: int) -> None:
        self.system = system
        self.target = target
        self.seed = seed
        self.source = random.Random(seed)
        self.traffic = Traffic()
        self.published = 0

    async def run(self, *, n: int) -> None:
        """Publish everything once: `n` made-up messages of each kind and what becomes of them on the way."""
        everything = await bus.connect(self.system.nats.url, "fuzz/all", credential=self.system.nats.credential)
        account = self.system.keyring.account()
        own = account.credential(STRANGER, grant("worker", STRANGER))
        worker = await bus.connect(self.system.nats.url, f"fuzz/{STRANGER}", credential=own)
        try:
            await everything.subscribe("rlharvest.v1.>", cb=self.traffic.hear)
            await everything.flush()
            await self._listen()
            await self._as_worker(worker, n)
            await self._malformed(everything, n)
            await self._again(everything)
        finally:
            await worker.close()
            await everything.close()

    async def _listen(self) -> None:
        """Wait for real messages of what a running job always sends."""
        async with asyncio.timeout(60):
            while not all(self.traffic.of(kind) for kind in ("spans", "ledger", "beat", "acks")):  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def _as_worker(self, client: Client, n: int) -> None:
        """A worker says under its own name whatever it likes, and tries every other subject."""
        for kind in MESSAGES:
            for data in [*self._shaped(kind, n), *self.traffic.of(kind)[:20], *garbage(self.source)]:
                subjects = [self._subject(kind, self.target.job, STRANGER)]
                if STRANGER not in ROUTES[kind].senders:
                    subjects.append(self._subject(kind, self.target.job, self.target.worker))
                for subject in subjects:
                    await self._publish(client, subject, data)

    async def _malformed(self, client: Client, n: int) -> None:
        """What does not verify, on every subject."""
        for kind in MESSAGES:
            real = self.traffic.of(kind)
            sources = [*self._shaped(kind, n), *self.source.sample(real, min(len(real), n))]
            spoilt = [data for one in sources for data in broken(one, self.source)]
            huge = b"\x0a" + varint(900_000) + bytes(900_000)
            for data in [*spoilt, *garbage(self.source), self.source.randbytes(bus.MAX_PAYLOAD_BYTES - 4096), huge]:
                for who in (self.target.worker, self.source.choice(NAMES)):
                    if commands(kind, data, who, self.target):
                        continue
                    job = self.source.choice([self.target.job, self.target.job, self.target.over, UNKNOWN, bus.NO_JOB])
                    await self._publish(client, self._subject(kind, job, who), data)
        for subject, data in epochs(self.target):
            await self._publish(client, subject, data)

    async def _again(self, client: Client) -> None:
        """Real messages once more: at once, doubled, and in another order."""
        heard = self.traffic.heard[:1500]
        mixed = self.source.sample(heard, len(heard))
        for subject, data in [*heard[-100:], *heard[-100:], *mixed]:
            await self._publish(client, subject, data)

    def _shaped(self, kind: bus.Kind, n: int) -> list[bytes]:
        made = drawn(messages(MESSAGES[kind], self.target.known), n, of=self.seed)
        return [message.SerializeToString() for message in made]

    def _subject(self, kind: str, job: str, who: str) -> str:
        return f"rlharvest.v1.{kind}.{job}.{who}"

    async def _publish(self, client: Client, subject: str, data: bytes) -> None:
        await client.publish(subject, data)
        self.published += 1
        if self.published % 50 == 0:
            await client.flush()
