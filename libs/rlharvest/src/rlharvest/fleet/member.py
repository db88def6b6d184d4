"""The life of a worker, as pure functions of what was observed and when.

    joining → warming → ready ⇄ suspect → dead
                  any of them → draining → gone

Invariants (property-tested): dead and gone never change: such a worker joins again as a new incarnation; a heartbeat of
another incarnation changes nothing; time that the coordinator itself was stalled never counts against a worker.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntEnum

from rlharvest.v1 import fleet_pb2


class WorkerState(IntEnum):
    """Where a worker is in its life."""

    JOINING = fleet_pb2.WORKER_STATE_JOINING
    """It registered."""

    WARMING = fleet_pb2.WORKER_STATE_WARMING
    """It fetches or loads weights."""

    READY = fleet_pb2.WORKER_STATE_READY
    """It can take responses."""

    DRAINING = fleet_pb2.WORKER_STATE_DRAINING
    """It hands back what it holds."""

    SUSPECT = fleet_pb2.WORKER_STATE_SUSPECT
    """A heartbeat is late: it gets nothing new."""

    DEAD = fleet_pb2.WORKER_STATE_DEAD
    """Its heart stopped."""

    GONE = fleet_pb2.WORKER_STATE_GONE
    """It left in order."""


ENDED = frozenset({WorkerState.DEAD, WorkerState.GONE})


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Deadlines, in seconds."""

    heartbeat_s: float
    deadline_s: float

    @property
    def suspect_s(self) -> float:
        """A heartbeat this late makes a worker suspect."""
        return min(2.5 * self.heartbeat_s, 0.75 * self.deadline_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """One incarnation of a worker."""

    worker: str
    incarnation: int
    state: WorkerState
    heard: float
    """When the last heartbeat came, on the coordinator's monotonic clock."""
    reported: WorkerState = WorkerState.JOINING
    """What it said of itself last."""


def join(worker: str, incarnation: int, *, now: float) -> Member:
    """Return a worker that has just registered."""
    return Member(worker=worker, incarnation=incarnation, state=WorkerState.JOINING, heard=now)


def beat(member: Member, incarnation: int, reported: WorkerState, *, now: float) -> Member:
    """Take a heartbeat in."""
    if member.state in ENDED or incarnation != member.incarnation:
        return member
    if member.state is WorkerState.DRAINING:
        reported = WorkerState.DRAINING
    return replace(member, state=reported, reported=reported, heard=now)


def tick(member: Member, timing: Timing, *, now: float) -> Member:
    """Let time pass."""
    if member.state in ENDED:
        return member
    silent = now - member.heard
    if silent >= timing.deadline_s:
        return replace(member, state=WorkerState.DEAD)
    if silent >= timing.suspect_s and member.state is not WorkerState.DRAINING:
        return replace(member, state=WorkerState.SUSPECT)
    return member


def drain(member: Member) -> Member:
    """It was asked to leave, or says that it will."""
    return member if member.state in ENDED else replace(member, state=WorkerState.DRAINING)


def leave(member: Member) -> Member:
    """It left in order."""
    return member if member.state is WorkerState.DEAD else replace(member, state=WorkerState.GONE)


def forgive(member: Member, seconds: float) -> Member:
    """Take out time in which the coordinator itself did not run."""
    return replace(member, heard=member.heard + seconds)
