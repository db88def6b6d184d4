"""The worker: joins, takes leases and assignments, beats, and leaves in order.

Invariants: the worker's name is the process's, the incarnation a new one at each join; every order is checked against
epoch and incarnation first; heartbeats come from the event loop, which no engine blocks; a second lease is taken only
after the job before was handed over; a worker that leaves does not join again, and beats no more once it said so.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import grpc.aio
import structlog
from google.protobuf.message import DecodeError, Message
from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from rlharvest import bus
from rlharvest.engine import Engine
from rlharvest.errors import DataError, Unavailable
from rlharvest.supervise import Supervisor, cancel
from rlharvest.v1 import fleet_pb2, spans_pb2

from rlharvest_rollout import heartbeat, metrics
from rlharvest_rollout.events import Events
from rlharvest_rollout.fleet import Fleet
from rlharvest_rollout.lease import Fence, Target, target_of
from rlharvest_rollout.session import Session
from rlharvest_rollout.settings import RolloutSettings
from rlharvest_rollout.versions import Versions

log = structlog.get_logger(__name__)

_Order = TypeVar("_Order", bound=Message)

_LEAVE_S = 1.0
_RELEASE_S = 5.0
"""Longest time for publishing a job's tail before the next job is served."""


class Worker:
    """One rollout worker of one process."""

    def __init__(
        self,
        name: str,
        settings: RolloutSettings,
        *,
        supervisor: Supervisor,
        nc: Client,
        fleet: Fleet,
        versions: Versions,
        make_engine: Callable[[str], Engine],
        import_engine: Callable[[str], None],
    ) -> None:
        self.name = name
        self.state: fleet_pb2.WorkerState.ValueType = fleet_pb2.WORKER_STATE_JOINING
        self._settings = settings
        self._supervisor = supervisor
        self._nc = nc
        self._fleet = fleet
        self._versions = versions
        self._make_engine = make_engine
        self._import_engine = import_engine
        self._events = Events(nc, name)
        self._flush_numbers = itertools.count(1)
        self._fence = Fence()
        self._target: Target | None = None
        self._session: Session | None = None
        self._unservable: Target | None = None
        self._note = ""
        self._heartbeat_s = 0.5
        self._lease_changed = asyncio.Event()
        self._beat_now = asyncio.Event()
        self._rejoin = asyncio.Event()
        self._rate = heartbeat.Rate()
        self._generated_before = 0
        """Tokens of this incarnation in the jobs before this one."""
        self._leave_reason = "shut down"
        self._leaving = False
        """It joins no more."""
        self._left = False
        """It beats no more."""
        self._registering = False
        self._membership: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Listen, then join in the background."""
        who = self.name
        for kind, job, handler in (
            ("lease", "*", self._on_lease),
            ("assign", "*", self._on_assign),
            ("abort", "*", self._on_abort),
            ("acks", "*", self._on_acks),
            ("rejoin", bus.NO_JOB, self._on_rejoin),
            ("drain", bus.NO_JOB, self._on_drain),
        ):
            await self._nc.subscribe(bus.subject(kind, job, who), cb=handler)  # type: ignore[arg-type]  # a Kind
        await self._nc.subscribe(bus.subject("resend", "*"), cb=self._on_resend)
        # Whoever knows of this worker may give it orders at once.
        await self._nc.flush()
        self._membership = self._supervisor.spawn("membership", self._keep_joined())
        self._supervisor.spawn("leases", self._serve())
        self._supervisor.spawn("heartbeats", self._beat())
        self._supervisor.spawn("engines", self._import_engines(), may_end=True)

    async def leave(self) -> None:
        """Stop generating, publish the tail as final, hand back, leave."""
        self._leaving = True
        if self._registering and self._membership is not None:
            # The coordinator may have registered this worker already, and would miss its heartbeats.
            await asyncio.wait([self._membership], timeout=_LEAVE_S)
            await cancel([self._membership])
        joined = self.state != fleet_pb2.WORKER_STATE_JOINING
        self.state = fleet_pb2.WORKER_STATE_DRAINING
        self._beat_now.set()
        session = self._session
        if session is not None:
            await session.hand_over(self._settings.drain_s, final=True)
        self._left = True
        if joined:
            try:
                await self._fleet.leave(self._fence.incarnation, self._leave_reason, total_s=_LEAVE_S)
            except (Unavailable, grpc.aio.AioRpcError) as error:
                log.warning("worker.left_silently", error=str(error))
        if session is not None:
            await session.close()
        log.info("worker.left", worker=self.name, reason=self._leave_reason)

    async def ready(self) -> str | None:
        """A health check: None when responses can be taken."""
        if not self._nc.is_connected:
            return "NATS is not connected"
        if self.state == fleet_pb2.WORKER_STATE_JOINING:
            return "no coordinator has registered it yet" if self._registering else "its engines are being imported"
        if self.state == fleet_pb2.WORKER_STATE_DRAINING:
            return "draining"
        if self._target is not None and (self._session is None or self._session.engine.version is None):
            return self._said() or "no version is loaded yet"
        return None

    # --- orders ---

    async def _on_lease(self, msg: Msg) -> None:
        lease = _parse(fleet_pb2.Lease, msg)
        if lease is None:
            return
        reason = self._refusal(lease.epoch, lease.incarnation)
        if reason is None and lease.job:
            target = target_of(lease, offered=self._settings.offered_engines, slots=self._settings.slots)
            if isinstance(target, str):
                reason = target
            else:
                self._target = target
        elif reason is None:
            self._target = None
        if reason is None:
            self._lease_changed.set()
        else:
            metrics.REFUSALS.labels("lease").inc()
            log.warning("lease.refused", job=lease.job, reason=reason)
        await self._reply(msg, fleet_pb2.LeaseReply(accepted=reason is None, reason=reason or ""))

    async def _on_assign(self, msg: Msg) -> None:
        message = _parse(fleet_pb2.Assignments, msg)
        if message is None:
            return
        job = bus.parse_subject(msg.subject)[1]
        reason = self._refusal(message.epoch, message.incarnation) or self._not_leased(job)
        if reason is not None or self._session is None:
            metrics.REFUSALS.labels("assign").inc()
            await self._reply(msg, fleet_pb2.AssignReply(accepted=False, reason=reason or "no lease"))
            return
        verdict = self._session.assign(message)
        await self._reply(msg, fleet_pb2.AssignReply(accepted=True, refused=verdict.refused, reason=verdict.reason))

    async def _on_abort(self, msg: Msg) -> None:
        message = _parse(fleet_pb2.Abort, msg)
        if message is None:
            return
        reason = self._refusal(message.epoch, message.incarnation) or self._not_leased(
            bus.parse_subject(msg.subject)[1]
        )
        if reason is None and self._session is not None:
            self._session.abort(message)
        else:
            metrics.REFUSALS.labels("abort").inc()
            log.info("abort.refused", reason=reason)

    async def _on_acks(self, msg: Msg) -> None:
        ack = _parse(spans_pb2.LedgerAck, msg)
        if ack is None or ack.incarnation != self._fence.incarnation:
            return  # of an incarnation that is over; its tokens are gone as well
        if self._session is not None and self._session.target.job == bus.parse_subject(msg.subject)[1]:
            self._session.acknowledge(ack)

    async def _on_resend(self, msg: Msg) -> None:
        message = _parse(spans_pb2.Resend, msg)
        job = bus.parse_subject(msg.subject)[1]
        if message is None or self._refusal(message.epoch, self._fence.incarnation) is not None:
            return
        if self._session is not None and self._session.target.job == job:
            self._session.resend()

    async def _on_rejoin(self, msg: Msg) -> None:
        message = _parse(fleet_pb2.Rejoin, msg)
        if message is None or self._leaving or self._refusal(message.epoch, message.incarnation) is not None:
            return
        if message.incarnation == self._fence.incarnation:
            log.warning("worker.rejoins", reason=message.reason)
            self._rejoin.set()

    async def _on_drain(self, msg: Msg) -> None:
        message = _parse(fleet_pb2.DrainOrder, msg)
        if message is not None and message.incarnation == self._fence.incarnation:
            self._leave_reason = message.reason or "drained"
            log.info("worker.drains", reason=self._leave_reason)
            self._supervisor.stop()

    def _refusal(self, epoch: int, incarnation: int) -> str | None:
        if self.state in (fleet_pb2.WORKER_STATE_DRAINING, fleet_pb2.WORKER_STATE_JOINING):
            return "draining" if self.state == fleet_pb2.WORKER_STATE_DRAINING else "not joined"
        return self._fence.refusal(epoch, incarnation)

    def _not_leased(self, job: str) -> str | None:
        if self._session is None or self._session.target.job != job:
            return f"job {job} is not leased to this worker"
        return None

    async def _reply(self, msg: Msg, message: Message) -> None:
        if msg.reply:
            await self._nc.publish(msg.reply, message.SerializeToString())

    # --- what turns ---

    async def _import_engines(self) -> None:
        """Import what is offered, then join: a worker that joined is warm. Importing torch blocks every thread for so
        long at times that on a busy machine heartbeats would be missed meanwhile."""
        for engine in self._settings.offered_engines:
            await asyncio.to_thread(self._import_engine, engine)
        self._rejoin.set()

    async def _keep_joined(self) -> None:
        while True:
            await self._rejoin.wait()
            if self._leaving:
                return
            self._rejoin.clear()
            self._registering = True
            self.state = fleet_pb2.WORKER_STATE_JOINING
            engine = self._session.engine if self._session is not None else None
            reply = await self._fleet.register(
                numerics_key=engine.numerics_key if engine is not None else "",
                batch_invariant=engine.batch_invariant if engine is not None else False,
            )
            self._fence.joined(reply.epoch, reply.incarnation)
            self._heartbeat_s = reply.heartbeat_s
            self._generated_before = 0
            if self._session is not None:
                await self._session.rejoined(reply.incarnation)
            self.state = fleet_pb2.WORKER_STATE_READY
            metrics.JOINS.inc()
            log.info("worker.joined", worker=self.name, incarnation=reply.incarnation, epoch=reply.epoch)
            self._registering = False
            self._beat_now.set()
            if self._leaving:
                return

    async def _serve(self) -> None:
        """Make what is served what the lease says."""
        while True:
            await self._lease_changed.wait()
            self._lease_changed.clear()
            target = self._target
            if self._session is not None and (target is None or not target.same_service(self._session.target)):
                session = self._session
                await session.hand_over(_RELEASE_S, final=False)
                self._session = None
                self._generated_before += session.generated
                await session.close()
                log.info("lease.released", job=session.target.job)
            if target is not None and self._session is None:
                await self._open(target)
            elif target is not None and self._session is not None:
                self._session.follow(target)
            self._beat_now.set()

    async def _open(self, target: Target) -> None:
        if target.same_service(self._unservable):
            return  # said once; a lease with other settings is tried again
        incarnation = self._fence.incarnation
        # Setting a device up may take seconds; heartbeats go on meanwhile.
        engine = await asyncio.to_thread(self._make_engine, target.engine)
        try:
            session = Session(
                target,
                engine,
                worker=self.name,
                incarnation=incarnation,
                settings=self._settings,
                supervisor=self._supervisor,
                nc=self._nc,
                fleet=self._fleet,
                versions=self._versions,
                flush_numbers=self._flush_numbers,
                report=self._report,
                changed=self._beat_now.set,
            )
            await session.start()
        except DataError as error:
            await engine.close()
            self._unservable = target
            self._note = f"job {target.job} cannot be served: {error}"
            log.error("lease.failed", job=target.job, error=str(error))
            await self._events.tell(target.job, "error", "worker.refused", self._note, {"error": str(error)})
            return
        except BaseException:
            await engine.close()
            raise
        self._note, self._unservable = "", None
        self._session = session
        if incarnation != self._fence.incarnation:  # it joined anew while the engine started
            await session.rejoined(self._fence.incarnation)
        log.info("lease.taken", job=target.job, engine=target.engine, version=target.version)

    async def _beat(self) -> None:
        while True:
            try:
                async with asyncio.timeout(self._heartbeat_s):
                    await self._beat_now.wait()
            except TimeoutError:
                pass  # the usual case: it is time
            self._beat_now.clear()
            if self._left:
                return
            if self.state == fleet_pb2.WORKER_STATE_JOINING or not self._nc.is_connected:
                continue
            beat = self._heartbeat()
            try:
                await self._nc.publish(bus.subject("beat", beat.job or bus.NO_JOB, self.name), beat.SerializeToString())
            except NatsError as error:
                log.warning("heartbeat.failed", error=repr(error))

    def _heartbeat(self) -> fleet_pb2.Heartbeat:
        beat = fleet_pb2.Heartbeat(
            worker=self.name, incarnation=self._fence.incarnation, state=self._shown_state(), note=self._said()
        )
        session = self._session
        beat.generated_tokens = self._generated_before + (session.generated if session is not None else 0)
        beat.tokens_per_s = self._rate.update(asyncio.get_running_loop().time(), beat.generated_tokens)
        if session is not None:
            heartbeat.describe(session, beat)
        return beat

    def _shown_state(self) -> fleet_pb2.WorkerState.ValueType:
        if self.state == fleet_pb2.WORKER_STATE_READY and self._target is not None:
            session = self._session
            if session is None or session.engine.version is None or session.target.job != self._target.job:
                return fleet_pb2.WORKER_STATE_WARMING
        return self.state

    def _said(self) -> str:
        return (self._session.note if self._session is not None else "") or self._note

    async def _report(self, level: str, kind: str, message: str, data: dict[str, Any]) -> None:
        job = self._target.job if self._target is not None else bus.NO_JOB
        await self._events.tell(job, level, kind, message, data)


def _parse(kind: type[_Order], msg: Msg) -> _Order | None:
    message = kind()
    try:
        message.ParseFromString(msg.data)
    except DecodeError as error:
        metrics.REFUSALS.labels("garbage").inc()
        log.warning("bus.garbage", subject=msg.subject, error=str(error))
        return None
    return message
