"""A small coordinator for tests of workers: gRPC Fleet, orders over NATS, and the ledger's fold in plain Python.

It decides nothing by itself: a test says whom to lease and what to assign. It keeps the ledger's rules: append only at
the length and by the current attempt, trim overlaps, answer gaps, fence old attempts, apply a finish even without a
token.
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc.aio
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.js.api import ConsumerConfig, DeliverPolicy

from rlharvest import bus
from rlharvest.accounts import Credential
from rlharvest.grants import grant
from rlharvest.keyring import Keyring
from rlharvest.rpc import Server
from rlharvest.spans import Finish, Flush, Span, Tokens, ids_bytes, skip_runs, unpack
from rlharvest.supervise import cancel
from rlharvest.v1 import fleet_pb2, fleet_pb2_grpc, spans_pb2


@dataclass(slots=True)
class Seen:
    """What is known of a worker."""

    request: fleet_pb2.RegisterRequest
    incarnation: int
    beat: fleet_pb2.Heartbeat | None = None
    beats: int = 0
    left: str | None = None
    final: bool = False
    """Its last message said that nothing follows."""


@dataclass(slots=True)
class Response:
    """A response in the fold."""

    attempt: int
    prompt: list[int]
    seed: int
    budget: int
    tokens: Tokens = field(default_factory=Tokens)
    finish: Finish = Finish.NONE
    workers: list[str] = field(default_factory=list)
    """Who added tokens, in order, without repetition."""


class FakeCoordinator:
    """Leads alone.

    Args:
        keyring: NATS asks for credentials of it, which workers get here.
        credential_s: how long those are good for.

    Attributes:
        acks: set to False to fold without answering.
        ledger: the responses by handle.
        counts: of rows by what became of them: applied, trimmed, fenced, gap.
    """

    def __init__(
        self,
        nats_url: str,
        job: str = "rljob_test",
        *,
        heartbeat_s: float = 0.1,
        epoch: int = 1,
        keyring: Keyring | None = None,
        credential_s: float = 3600.0,
    ) -> None:
        self.job = job
        self.epoch = epoch
        self.acks = True
        self.workers: dict[str, Seen] = {}
        self.ledger: dict[int, Response] = {}
        self.counts: Counter[str] = Counter()
        self.flushes: list[Flush] = []
        self.sampling = fleet_pb2.Sampling(temperature=1.0, top_p=1.0, eos_ids=[0], vocab=100)
        self.history: dict[int, list[bytes]] = {}
        """group -> history segments that assignments of it name, to be fetched."""
        self.history_asked: Counter[int] = Counter()
        """How often each group's history was fetched."""
        self.admissions = 0
        """Credentials that were given."""
        self._nats_url = nats_url
        self._keyring = keyring
        self._credential_s = credential_s
        self._heartbeat_s = heartbeat_s
        self._incarnations = 0
        self._attempts = 0
        self._server = Server()
        self._changed = asyncio.Event()
        self._last = 0
        """Sequence of the last message that was folded."""
        self._fold_task: asyncio.Task[None] | None = None
        self.nc: Client

    @property
    def grpc_address(self) -> str:
        return f"127.0.0.1:{self._server.port}"

    async def start(self) -> None:
        """Connect, make the streams, listen."""
        credential = None
        if self._keyring is not None:
            text = (self._keyring.holder("coordinator") / "nats_credentials").read_text(encoding="utf-8")
            credential = Credential.parse(text)
        self.nc = await bus.connect(self._nats_url, "fake-coordinator", credential=credential)
        await bus.ensure_streams(self.nc.jetstream())
        await self.nc.subscribe(bus.subject("beat", "*", "*"), cb=self._on_beat)
        self._server.add("rlharvest.v1.Fleet", fleet_pb2_grpc.add_FleetServicer_to_server, _Fleet(self))
        await self._server.start("127.0.0.1:0")
        self._fold_task = asyncio.create_task(self._fold())

    def admit(self, request: fleet_pb2.AdmitRequest) -> fleet_pb2.AdmitReply:
        """Give a worker its credential."""
        self.admissions += 1
        if self._keyring is None:
            return fleet_pb2.AdmitReply()
        given = grant("worker", request.worker)
        jwt = self._keyring.account().user(request.worker, request.public_key, given, seconds=self._credential_s)
        return fleet_pb2.AdmitReply(jwt=jwt, seconds=self._credential_s)

    async def close(self) -> None:
        if self._fold_task is not None:
            await cancel([self._fold_task])
        await self._server.close(0.1)
        await self.nc.close()

    async def until(self, true: Callable[[], object], what: str, *, timeout_s: float = 30.0) -> None:
        """Wait until something holds; it is looked at after every message.

        Raises:
            AssertionError: it does not hold in time; says what, and what is known.
        """
        try:
            async with asyncio.timeout(timeout_s):
                while not true():
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            beats = {name: str(seen.beat).replace("\n", " ") for name, seen in self.workers.items()}
            lengths = {handle: len(response.tokens.ids) for handle, response in self.ledger.items()}
            raise AssertionError(f"not in {timeout_s:g} s: {what}; {beats} {lengths} {self.counts}") from None

    async def worker(self, n: int = 1) -> str:
        """Wait until `n` workers joined in all; return the name of the last one."""
        await self.until(lambda: len(self.workers) >= n, f"{n} workers joined", timeout_s=60)
        return list(self.workers)[-1]

    async def lease(
        self, worker: str, *, weights_url: str, version: int = 0, rollout: dict[str, Any] | None = None, **fields: Any
    ) -> fleet_pb2.LeaseReply:
        """Lease a worker to the job."""
        lease = fleet_pb2.Lease(
            epoch=self.epoch,
            incarnation=self.workers[worker].incarnation,
            job=self.job,
            engine="stub",
            weights_url=weights_url,
            target_version=version,
            rollout_json=json.dumps(rollout or {}),
            context=4096,
        )
        lease.MergeFrom(fleet_pb2.Lease(**fields))
        reply = await self.nc.request(bus.subject("lease", self.job, worker), lease.SerializeToString(), timeout=3)
        return fleet_pb2.LeaseReply.FromString(reply.data)

    async def ready(self, worker: str, version: int = 0) -> None:
        """Wait until a worker says that it serves a version."""

        def serves() -> bool:
            beat = self.workers[worker].beat
            return (
                beat is not None
                and beat.state == fleet_pb2.WORKER_STATE_READY
                and beat.HasField("version")
                and beat.version >= version
            )

        await self.until(serves, f"{worker} serves version {version}")

    def assignment(
        self, handle: int, *, prompt: Sequence[int] = (1, 2, 3), seed: int | None = None, budget: int = 64
    ) -> fleet_pb2.Assignment:
        """Give a response a new owner in the ledger; return the assignment that tells it."""
        self._attempts += 1
        attempt = self.epoch << 32 | self._attempts
        response = self.ledger.get(handle)
        if response is None:
            response = Response(attempt, list(prompt), handle if seed is None else seed, budget)
            self.ledger[handle] = response
        response.attempt = attempt
        ids = response.tokens.ids
        return fleet_pb2.Assignment(
            handle=handle,
            attempt=attempt,
            group=handle,
            seed=response.seed,
            budget=response.budget,
            prompt=ids_bytes(response.prompt),
            prefix=ids_bytes(ids),
            prefix_length=len(ids),
            min_version=response.tokens.runs[-1].version if ids else 0,
        )

    async def assign(
        self, worker: str, assignments: Sequence[fleet_pb2.Assignment], *, epoch: int | None = None
    ) -> fleet_pb2.AssignReply:
        """Send assignments to a worker."""
        message = fleet_pb2.Assignments(
            epoch=self.epoch if epoch is None else epoch,
            incarnation=self.workers[worker].incarnation,
            sampling=self.sampling,
            assignments=assignments,
            draft_sources=[
                fleet_pb2.DraftSource(group=group, by_reference=True)
                for group in sorted({one.group for one in assignments} & self.history.keys())
            ],
        )
        reply = await self.nc.request(bus.subject("assign", self.job, worker), message.SerializeToString(), timeout=3)
        return fleet_pb2.AssignReply.FromString(reply.data)

    async def order(self, kind: bus.Kind, worker: str, message: Any) -> None:
        """Send a message without a reply: abort, rejoin, drain, resend."""
        job = bus.NO_JOB if kind in ("rejoin", "drain") else self.job
        await self.nc.publish(bus.subject(kind, job, worker), message.SerializeToString())

    def finished(self, n: int) -> Callable[[], bool]:
        """Return a condition: n responses are finished."""
        return lambda: sum(one.finish is not Finish.NONE for one in self.ledger.values()) >= n

    async def recover_stream(self) -> None:
        """The streams are new or empty: fold them from the start and ask every worker for what it still has."""
        while True:
            try:
                await bus.ensure_streams(self.nc.jetstream(timeout=1))
                break
            except (NatsError, TimeoutError):
                await asyncio.sleep(0.1)  # the connection is not back yet
        self._last = 0
        await self.order("resend", "coordinator", spans_pb2.Resend(epoch=self.epoch))

    # --- what comes in ---

    def register(self, request: fleet_pb2.RegisterRequest) -> fleet_pb2.RegisterReply:
        self._incarnations += 1
        self.workers[request.worker] = Seen(request, self._incarnations)
        self._changed.set()
        return fleet_pb2.RegisterReply(
            incarnation=self._incarnations, heartbeat_s=self._heartbeat_s, deadline_s=3.0, epoch=self.epoch
        )

    def left(self, request: fleet_pb2.LeaveRequest) -> None:
        self.workers[request.worker].left = request.reason
        self._changed.set()

    async def _on_beat(self, msg: Msg) -> None:
        beat = fleet_pb2.Heartbeat.FromString(msg.data)
        seen = self.workers.get(beat.worker)
        if seen is not None and seen.incarnation == beat.incarnation:
            seen.beat = beat
            seen.beats += 1
        self._changed.set()

    async def _fold(self) -> None:
        js = self.nc.jetstream()
        while True:
            # A consumer of its own for each connection; where it starts is ours to say.
            config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_SEQUENCE, opt_start_seq=self._last + 1)
            try:
                subscription = await js.pull_subscribe(
                    bus.subject("spans", self.job, "*"), stream=bus.LEDGER, config=config
                )
                while True:
                    for msg in await subscription.fetch(100, timeout=5):
                        self._last = msg.metadata.sequence.stream
                        await self._apply(unpack(msg.data))
                        await msg.ack()
            except (NatsError, TimeoutError, OSError):
                await asyncio.sleep(0.05)

    async def _apply(self, flush: Flush) -> None:
        self.flushes.append(flush)
        ack = spans_pb2.LedgerAck(incarnation=flush.incarnation)
        for span in flush.spans:
            status = self._append(flush.worker, span)
            response = self.ledger.get(span.handle)
            ack.handle.append(span.handle)
            ack.attempt.append(span.attempt)
            ack.length.append(0 if response is None else len(response.tokens.ids))
            ack.status.append(status)
        if flush.final and flush.worker in self.workers:
            self.workers[flush.worker].final = True
        self._changed.set()
        if self.acks and flush.spans:
            await self.nc.publish(bus.subject("acks", self.job, flush.worker), ack.SerializeToString())

    def _append(self, worker: str, span: Span) -> spans_pb2.AckStatus.ValueType:
        response = self.ledger.get(span.handle)
        if response is None or response.attempt != span.attempt:
            self.counts["fenced"] += 1
            return spans_pb2.ACK_STATUS_FENCED
        length = len(response.tokens.ids)
        if span.offset > length:
            self.counts["gap"] += 1
            return spans_pb2.ACK_STATUS_GAP
        skip = min(length - span.offset, len(span.ids))
        self.counts["trimmed"] += bool(skip)
        if skip < len(span.ids):
            response.tokens.extend(
                Span(
                    handle=span.handle,
                    attempt=span.attempt,
                    offset=length,
                    ids=span.ids[skip:],
                    logprobs=span.logprobs[skip:],
                    runs=skip_runs(span.runs, skip),
                )
            )
            if response.workers[-1:] != [worker]:
                response.workers.append(worker)
            self.counts["applied"] += 1
        if span.finish is not Finish.NONE and span.end == len(response.tokens.ids):
            response.finish = span.finish
        return spans_pb2.ACK_STATUS_APPLIED


class _Fleet(fleet_pb2_grpc.FleetServicer):
    """The gRPC service, as far as workers use it."""

    def __init__(self, coordinator: FakeCoordinator) -> None:
        self._coordinator = coordinator

    async def Admit(self, request: fleet_pb2.AdmitRequest, context: Any) -> fleet_pb2.AdmitReply:
        return self._coordinator.admit(request)

    async def Register(self, request: fleet_pb2.RegisterRequest, context: Any) -> fleet_pb2.RegisterReply:
        return self._coordinator.register(request)

    async def Leave(self, request: fleet_pb2.LeaveRequest, context: Any) -> fleet_pb2.LeaveReply:
        self._coordinator.left(request)
        return fleet_pb2.LeaveReply()

    async def GetPrefix(self, request: fleet_pb2.GetPrefixRequest, context: Any) -> fleet_pb2.GetPrefixReply:
        response = self._coordinator.ledger.get(request.handle)
        if response is None or response.attempt != request.attempt:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "another attempt owns the response")
            raise AssertionError("abort raises")
        return fleet_pb2.GetPrefixReply(prompt=ids_bytes(response.prompt), prefix=ids_bytes(response.tokens.ids))

    async def GetDrafts(self, request: fleet_pb2.GetDraftsRequest, context: Any) -> fleet_pb2.GetDraftsReply:
        self._coordinator.history_asked[request.group] += 1
        return fleet_pb2.GetDraftsReply(segments=self._coordinator.history.get(request.group, []))
