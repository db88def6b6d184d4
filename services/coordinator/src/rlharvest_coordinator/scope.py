"""What the parts of a run share: the job, its inputs, its book, and whom it can reach."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any

import structlog
from nats.aio.client import Client
from rlharvest.clock import Clock
from rlharvest.fleet.member import WorkerState
from rlharvest.ids import new_id
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import Status
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import Response
from rlharvest.policies.staleness import Gate

from rlharvest_coordinator.data.prepare import Prepared
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.roster import Roster, Seat
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import events
from rlharvest_coordinator.tables import Job

log = structlog.get_logger(__name__)

_LEVELS = {"info": 20, "warn": 30, "error": 40}


class Scope:
    """One running job."""

    def __init__(
        self,
        row: Job,
        prepared: Prepared,
        *,
        keeper: Keeper,
        roster: Roster,
        nats: Client,
        sessions: Sessions,
        clock: Clock,
    ) -> None:
        self.id = row.id
        self.row = row
        """The job in SQL, as it was read last."""
        self.spec = JobSpec.model_validate(row.spec)
        self.prepared = prepared
        self.keeper = keeper
        self.roster = roster
        self.nats = nats
        self.js = nats.jetstream(timeout=3)
        self.sessions = sessions
        self.clock = clock
        self.gate = Gate(
            self.spec.algorithm.prompts_per_step, self.spec.staleness.max_staleness, self.spec.limits.max_steps
        )
        self.versions: dict[int, int] = {}
        """Version -> optimizer step."""
        self.woken = asyncio.Event()
        """Something happened: look at everything now."""
        self._tasks: set[asyncio.Task[Any]] = set()

    @property
    def book(self) -> Book:
        """The job's book, as it is now; a recovery replaces it."""
        return self.keeper.books[self.id]

    @property
    def status(self) -> Status:
        return Status(self.row.status)

    @property
    def engine(self) -> str:
        """Engine that the job needs; `auto`: each worker takes the best that it has."""
        return self.spec.rollout.engine

    def seat(self, response: Response) -> Seat | None:
        """Return the worker that owns a response, unless it has joined anew since."""
        seat = self.roster.seats.get(response.worker)
        return seat if seat is not None and seat.incarnation == response.incarnation else None

    def owned(self) -> Iterable[Response]:
        """The responses that have an owner."""
        return self.book.index.owned()

    def ready_seats(self) -> list[Seat]:
        """The workers that can take responses of this job."""
        return [
            seat
            for seat in self.roster.seats.values()
            if seat.member.state is WorkerState.READY and seat.job == self.id and seat.version in self.versions
        ]

    def event(self, level: str, kind: str, message: str, data: dict[str, Any]) -> None:
        """Write an event and a line of the log."""
        item = events.NewEvent(
            id=new_id("evt"),
            job=self.id,
            level=level,
            type=kind,
            message=message,
            at=self.clock.time(),
            source="coordinator",
            data=data,
        )
        log.log(_LEVELS[level], kind, job=self.id, message=message)
        self.later(events.append(self.sessions, [item]))

    def later(self, coroutine: Coroutine[Any, Any, Any]) -> None:
        """Send a message without waiting for it; one that fails is logged, what matters is sent again by the next round."""
        task = asyncio.ensure_future(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._sent)

    def _sent(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("message.failed", job=self.id, error=repr(error))
