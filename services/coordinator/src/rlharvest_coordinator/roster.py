"""The roster of workers: who is there, what each said last, and who has gone silent. Implements the gRPC service Fleet.

Invariants: a worker's incarnation rises each time it joins and is in SQL before it hears of it, so no coordinator gives one
twice; a heartbeat of another incarnation is answered with `rejoin` and changes nothing; time in which this process itself
stood still is taken out of every deadline, so a busy coordinator declares nobody dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import structlog
from google.protobuf.message import DecodeError
from nats.aio.client import Client
from nats.aio.msg import Msg
from rlharvest.bus import names_one, parse_subject, subject
from rlharvest.clock import Clock
from rlharvest.errors import LimitReached, NotFound
from rlharvest.fleet import member as life
from rlharvest.fleet.member import ENDED, Member, Timing, WorkerState
from rlharvest.rpc import NOT_LEADER
from rlharvest.v1 import fleet_pb2, fleet_pb2_grpc

from rlharvest_coordinator import registration
from rlharvest_coordinator.live import LiveWorker
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import workers as store
from rlharvest_coordinator.store.values import storable
from rlharvest_coordinator.tables import Worker

log = structlog.get_logger(__name__)

_STALL_S = 0.5
"""A tick that comes this much late means that this process stood still."""


@dataclass(slots=True)
class Seat:
    """One incarnation of a worker, with what it told."""

    member: Member
    hostname: str
    pid: int
    worker_class: str
    worker_type: str
    engines: tuple[str, ...]
    slots: int
    numerics_key: str
    batch_invariant: bool
    joined_at: float
    heartbeat: fleet_pb2.Heartbeat | None = None
    beats: int = 0
    held: dict[int, int] = field(default_factory=dict)
    """handle -> attempt, as its last heartbeat has it."""
    lengths: dict[int, int] = field(default_factory=dict)
    """handle -> tokens that it has of it, as its last heartbeat has it."""
    leased_at: float = -1e9
    """When a lease was last sent, monotonic."""
    offered: tuple[str, int] | None = None
    """Job and version of that lease."""

    @property
    def id(self) -> str:
        return self.member.worker

    @property
    def incarnation(self) -> int:
        return self.member.incarnation

    @property
    def job(self) -> str | None:
        """Job that it serves, as it says itself."""
        return (self.heartbeat.job or None) if self.heartbeat is not None else None

    @property
    def version(self) -> int | None:
        """Version that it samples with."""
        if self.heartbeat is None or not self.heartbeat.HasField("version"):
            return None
        return self.heartbeat.version


class Roster(fleet_pb2_grpc.FleetServicer):
    """All workers that this coordinator knows."""

    def __init__(
        self,
        nats: Client,
        sessions: Sessions,
        clock: Clock,
        timing: Timing,
        epoch: Callable[[], int],
        *,
        most_workers: int,
    ) -> None:
        self.most_workers = most_workers
        self.nats = nats
        self.sessions = sessions
        self.clock = clock
        self.timing = timing
        self.epoch = epoch
        self.seats: dict[str, Seat] = {}
        self.corrupt = 0
        """Heartbeats that were none, or not of whom they came from."""
        self.admit: Callable[[fleet_pb2.AdmitRequest], fleet_pb2.AdmitReply] = lambda _request: fleet_pb2.AdmitReply()
        self.prefix: Callable[[fleet_pb2.GetPrefixRequest], fleet_pb2.GetPrefixReply | None] = lambda _request: None
        self.history: Callable[[fleet_pb2.GetDraftsRequest], list[bytes]] = lambda _request: []
        self.on_beat: Callable[[Seat], None] = lambda _seat: None
        self.on_loss: Callable[[Seat, str], None] = lambda _seat, _reason: None
        self._last_tick: float | None = None
        self._told: dict[str, float] = {}

    async def start(self) -> None:
        """Take up the workers that an earlier coordinator knew."""
        for row in await store.newest(self.sessions, limit=10_000):
            if row.state not in ("dead", "gone"):
                self.seats[row.id] = self._seat(row)

    def _seat(self, row: Worker) -> Seat:
        return Seat(
            member=life.join(row.id, row.incarnation, now=self.clock.monotonic()),
            hostname=row.hostname,
            pid=row.pid,
            worker_class=row.worker_class,
            worker_type=row.worker_type,
            engines=tuple(row.engines),
            slots=row.slots,
            numerics_key=row.numerics_key,
            batch_invariant=row.batch_invariant,
            joined_at=row.joined_at,
        )

    # --- gRPC ---------------------------------------------------------------------------------------------------------

    async def Admit(
        self, request: fleet_pb2.AdmitRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.AdmitReply:
        return self.admit(request)

    async def Register(
        self, request: fleet_pb2.RegisterRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.RegisterReply:
        registration.check(request)
        epoch = await self._lead(context)
        old = self.seats.get(request.worker)
        here = sum(seat.member.state not in ENDED for seat in self.seats.values())
        if here >= self.most_workers and (old is None or old.member.state in ENDED):
            raise LimitReached("workers", self.most_workers, "Stop some, or set RLHARVEST_MOST_WORKERS.")
        known = old.incarnation if old is not None else 0
        try:
            known = max(known, (await store.get(self.sessions, request.worker)).incarnation)
        except NotFound:
            pass
        incarnation = known + 1
        if old is not None and old.member.state not in ENDED:
            self._end(old, "joined again")
        fields = {
            "state": "joining",
            "worker_class": _CLASSES.get(request.worker_class, "preemptible"),
            "worker_type": request.worker_type,
            "hostname": request.hostname,
            "pid": request.pid,
            "engines": list(request.engines),
            "slots": max(1, request.slots),
            "numerics_key": request.numerics_key,
            "batch_invariant": request.batch_invariant,
            "build": request.build,
        }
        now = self.clock.time()
        await store.join(self.sessions, request.worker, incarnation, now=now, epoch=epoch, **fields)
        self.seats[request.worker] = self._seat(await store.get(self.sessions, request.worker))
        log.info("worker.joined", worker=request.worker, incarnation=incarnation, slots=request.slots)
        return fleet_pb2.RegisterReply(
            incarnation=incarnation,
            heartbeat_s=self.timing.heartbeat_s,
            deadline_s=self.timing.deadline_s,
            epoch=epoch,
        )

    async def Leave(
        self, request: fleet_pb2.LeaveRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.LeaveReply:
        await self._lead(context)
        seat = self.seats.get(request.worker)
        if seat is not None and seat.incarnation == request.incarnation:
            seat.member = life.leave(seat.member)
            log.info("worker.left", worker=seat.id, reason=request.reason)
            reason = storable(request.reason[: registration.MAX_TEXT])
            self.on_loss(seat, reason or "left")
            await self._record(seat, reason)
        return fleet_pb2.LeaveReply()

    async def GetPrefix(
        self, request: fleet_pb2.GetPrefixRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.GetPrefixReply:
        await self._lead(context)
        reply = self.prefix(request)
        if reply is None:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "the attempt does not own this response")
        assert reply is not None
        return reply

    async def GetDrafts(
        self, request: fleet_pb2.GetDraftsRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> fleet_pb2.GetDraftsReply:
        await self._lead(context)
        return fleet_pb2.GetDraftsReply(segments=self.history(request))

    async def _lead(self, context: grpc.aio.ServicerContext[Any, Any]) -> int:
        epoch = self.epoch()
        if not epoch:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, NOT_LEADER)
        return epoch

    # --- heartbeats ---------------------------------------------------------------------------------------------------

    async def listen(self) -> None:
        """Hear heartbeats, for ever."""
        subscription = await self.nats.subscribe(subject("beat", "*", "*"))
        async for message in subscription.messages:
            await self._heard(message)

    async def _heard(self, message: Msg) -> None:
        sender = parse_subject(message.subject)[2]
        beat, problem = _read(message.data, sender)
        if problem:
            self.corrupt += 1
            log.warning("worker.corrupt_heartbeat", worker=sender, problem=problem)
            return
        seat = self.seats.get(beat.worker)
        if seat is None or seat.incarnation != beat.incarnation or seat.member.state in ENDED:
            now = self.clock.monotonic()
            if now - self._told.get(beat.worker, -1e9) > 1.0:
                self._told[beat.worker] = now
                reason = "unknown" if seat is None else f"incarnation {beat.incarnation} is over"
                order = fleet_pb2.Rejoin(incarnation=beat.incarnation, reason=reason, epoch=self.epoch())
                await self.nats.publish(subject("rejoin", who=beat.worker), order.SerializeToString())
            return
        seat.member = life.beat(seat.member, beat.incarnation, WorkerState(beat.state), now=self.clock.monotonic())
        seat.heartbeat = beat
        seat.beats += 1
        seat.held = dict(zip(beat.held, beat.held_attempt, strict=False))
        seat.lengths = dict(zip(beat.held, beat.held_length, strict=False))
        self.on_beat(seat)

    async def tick(self) -> None:
        """Look who has gone silent; call this every heartbeat or oftener."""
        now = self.clock.monotonic()
        if self._last_tick is not None:
            late = now - self._last_tick - self.timing.heartbeat_s
            if late > _STALL_S:
                log.warning("coordinator.stalled", seconds=round(late, 2))
                for seat in self.seats.values():
                    seat.member = life.forgive(seat.member, late)
        self._last_tick = now
        self._told = {worker: at for worker, at in self._told.items() if now - at < _TOLD_S}
        if not self.nats.is_connected:
            # Nobody can be heard: silence says nothing of the workers.
            for seat in self.seats.values():
                seat.member = life.forgive(seat.member, now - seat.member.heard)
        for seat in list(self.seats.values()):
            before = seat.member.state
            seat.member = life.tick(seat.member, self.timing, now=now)
            if seat.member.state is WorkerState.DEAD and before is not WorkerState.DEAD:
                silent = now - seat.member.heard
                log.warning("worker.dead", worker=seat.id, silent_s=round(silent, 2))
                self.on_loss(seat, f"no heartbeat for {silent:.1f} s")
                await self._record(seat, f"no heartbeat for {silent:.1f} s")
            elif seat.member.state in ENDED and now - seat.member.heard > 600:
                del self.seats[seat.id]

    def _end(self, seat: Seat, reason: str) -> None:
        seat.member = life.leave(seat.member)
        self.on_loss(seat, reason)

    async def _record(self, seat: Seat, reason: str) -> None:
        state = "dead" if seat.member.state is WorkerState.DEAD else "gone"
        await store.leave(
            self.sessions,
            seat.id,
            seat.incarnation,
            state=state,
            reason=reason,
            now=self.clock.time(),
            epoch=self.epoch(),
        )

    async def drain(self, seat: Seat, reason: str) -> None:
        """Ask a worker to stop, hand back and leave."""
        seat.member = life.drain(seat.member)
        order = fleet_pb2.DrainOrder(incarnation=seat.incarnation, reason=reason)
        await self.nats.publish(subject("drain", who=seat.id), order.SerializeToString())

    def live(self, seat: Seat) -> LiveWorker:
        """Return a worker as the API shows it."""
        beat = seat.heartbeat
        return LiveWorker(
            id=seat.id,
            incarnation=seat.incarnation,
            state=seat.member.state.name.lower(),
            job=seat.job,
            version=seat.version,
            slots=seat.slots,
            held=len(seat.held),
            tokens_per_s=round(beat.tokens_per_s, 2) if beat is not None else 0.0,
            generated_tokens=beat.generated_tokens if beat is not None else 0,
            heartbeat_age_s=max(0.0, self.clock.monotonic() - seat.member.heard),
            note=beat.note[: registration.MAX_TEXT] if beat is not None else "",
            hostname=seat.hostname,
            pid=seat.pid,
            worker_class=seat.worker_class,
            worker_type=seat.worker_type,
            engines=seat.engines,
            numerics_key=seat.numerics_key,
            batch_invariant=seat.batch_invariant,
            joined_at=seat.joined_at,
        )


def _read(data: bytes, sender: str) -> tuple[fleet_pb2.Heartbeat, str]:
    """Return a heartbeat, and what is wrong with it; an empty text: nothing."""
    if not names_one(sender):
        return fleet_pb2.Heartbeat(), f"{sender!r} is not a worker's name"
    try:
        beat = fleet_pb2.Heartbeat.FromString(data)
    except DecodeError as error:
        return fleet_pb2.Heartbeat(), str(error)
    if beat.worker != sender:
        return beat, f"it names {beat.worker!r}"
    if beat.state not in _REPORTED:
        return beat, f"{beat.state} is not a state that a worker says of itself"
    if len({len(beat.held), len(beat.held_attempt), len(beat.held_length)}) > 1:
        return beat, f"{len(beat.held)} responses, {len(beat.held_attempt)} attempts, {len(beat.held_length)} lengths"
    if not math.isfinite(beat.tokens_per_s) or beat.version > _MAX_VERSION:
        return beat, f"tokens_per_s is {beat.tokens_per_s}, version {beat.version}"
    return beat, ""


_REPORTED = frozenset(
    {
        fleet_pb2.WORKER_STATE_JOINING,
        fleet_pb2.WORKER_STATE_WARMING,
        fleet_pb2.WORKER_STATE_READY,
        fleet_pb2.WORKER_STATE_DRAINING,
    }
)
_MAX_VERSION = 2**31 - 1
_TOLD_S = 10.0
"""How long it is remembered that a stranger was told to join."""
_CLASSES = {fleet_pb2.WORKER_CLASS_RESERVED: "reserved", fleet_pb2.WORKER_CLASS_PREEMPTIBLE: "preemptible"}
