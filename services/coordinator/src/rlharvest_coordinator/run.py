"""One running job, round by round.

The book (rlharvest.ledger) says what is; rlharvest.policies say what should be done; a round puts the difference into the
log, one transition at a time, and acts when the log has it. Everything is level-triggered from the book, the roster and
SQL: a run that starts after a crash does what remains to be done, whatever had been done before.

Invariant: nothing is sent to a worker before the log has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import structlog
from rlharvest.errors import Unavailable
from rlharvest.fleet.member import ENDED, WorkerState
from rlharvest.ids import response_id
from rlharvest.jobs.state import TERMINAL, Move, Status
from rlharvest.ledger.record import Effects
from rlharvest.ledger.response import FIRST_SERVED, State
from rlharvest.v1 import ledger_pb2

from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.dispatcher import Dispatcher
from rlharvest_coordinator.harvest import Harvest
from rlharvest_coordinator.history import History
from rlharvest_coordinator.live import LiveJob
from rlharvest_coordinator.log import Entry
from rlharvest_coordinator.obstacles import Obstacle, obstacle
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.serving import Serving
from rlharvest_coordinator.store import groups, jobs

log = structlog.get_logger(__name__)

MOST_CHANGES = 4096
"""In one transition, which must fit into one message."""


class Run:
    """A job under way. `tick` is called by the core, often and whenever something happened."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.history = History(scope)
        self.courier = Courier(scope, self.history)
        self.harvest = Harvest(scope, self.courier)
        self.dispatcher = Dispatcher(scope, self.courier, self.harvest)
        self.serving = Serving(scope, self.courier)
        self.closed = False
        self.doubtful = False
        """A write to SQL failed: it may have been made all the same, so SQL is read again."""
        self.obstacle: Obstacle | None = None
        """What keeps the rounds from being made."""
        self.trainers_obstacle: Obstacle | None = None
        """What the trainer says that it waits for."""
        self.trainer_heard: float | None = None
        """When the trainer was last heard of, monotonic; None: there was none, or it let go."""
        self.lost_version: int | None = None
        """The newest version, if the weight service has it no more."""
        self._proposed = 0
        """Sequence of the last transition: until the keeper has read it, its effects are not in the book."""

    @property
    def id(self) -> str:
        return self.scope.id

    @property
    def active(self) -> bool:
        """Whether workers shall serve it now."""
        return self.scope.status is Status.RUNNING and self.scope.row.version is not None and not self.closed

    async def start(self) -> None:
        """Open the book and take over what SQL knows of the job."""
        await self.scope.keeper.open(self.id)
        self.scope.versions = await groups.versions(self.scope.sessions, self.id)
        await self.harvest.start()
        await self.refresh()

    async def refresh(self) -> None:
        """Read the job's row again."""
        self.scope.row = await jobs.get(self.scope.sessions, self.id)

    def recovered(self) -> None:
        """The book was taken from the store again: nothing that was on its way counts."""
        self._proposed = 0
        self.harvest.questions.asked.clear()
        self.history.recovered()
        self.serving.recovered()
        self.scope.woken.set()

    async def applied(self, entries: Sequence[tuple[Entry, Effects]]) -> None:
        """Hear what the log changed."""
        assigned: list[int] = []
        left: list[int] = []
        for _entry, effects in entries:
            if effects.transition is not None and effects.transition.epoch == self.scope.keeper.epoch:
                assigned += [change.assign.handle for change in effects.changes if change.HasField("assign")]
            left += [ordinal for change in effects.changes if (ordinal := _left(change)) is not None]
            if effects.score is not None:
                self.harvest.questions.asked.pop(effects.score.handle, None)
        await self.courier.acknowledge_all(entries)
        for ordinal in left:
            self.history.left(ordinal)
        n = self.scope.spec.sampling.num_generations
        # Only now: their last acknowledgements are noted above, and none can come any more.
        for handle in chain.from_iterable(
            self.serving.left(ordinal) if ordinal >= FIRST_SERVED else range(ordinal * n, (ordinal + 1) * n)
            for ordinal in left
        ):
            self.courier.forget(handle)
            self.harvest.forget(handle)
        self.courier.send(assigned)
        self.serving.applied(entries)
        self.scope.woken.set()

    def beat(self, seat: Seat) -> None:
        """A worker of this job sent a heartbeat."""
        if not self.closed and self.id in self.scope.keeper.books:
            self.dispatcher.beat(seat)

    async def tick(self) -> None:
        """Do what is to be done now."""
        if self.closed:
            return
        if self.scope.status in TERMINAL:
            await self._close()
            return
        if self.doubtful:
            await self.harvest.start()
            self.doubtful = False
        await self.harvest.ask_for_scores()
        changes = await self.harvest.settle()
        if self.harvest.failure:
            await self.fail(self.harvest.failure)
            return
        if self.scope.keeper.caught_up:
            await self.harvest.form_batches()
        if self.scope.status is not Status.RUNNING:
            self.serving.end(Unavailable(f"The job is {self.scope.status}; the completion ended early."))
        if self.scope.keeper.applied_to < self._proposed:
            return  # what is due now is due in the next round as well
        changes += self.serving.let_go()
        if self.active:
            await self.history.follow()
            self.dispatcher.going_on()
            changes += self.serving.admit()
            changes += [*self.dispatcher.orphans(), *self.dispatcher.conclude(), *self.dispatcher.admit()]
            changes += self.dispatcher.assign({change.orphan.handle for change in changes if change.HasField("orphan")})
        elif self.scope.status is not Status.RUNNING:
            changes += self.dispatcher.hand_back()
        # What is due and left out now is due in the next round as well.
        if changes := changes[:MOST_CHANGES]:
            recoveries = self.scope.keeper.recoveries
            sequence = await self.scope.keeper.propose(self.id, changes)
            # After a recovery the log may be a new stream, whose sequences are others.
            self._proposed = sequence if self.scope.keeper.recoveries == recoveries else 0

    async def fail(self, error: str) -> None:
        """End the job: it cannot go on."""
        self.scope.row = await jobs.move(
            self.scope.sessions,
            self.id,
            Move.FAIL,
            now=self.scope.clock.time(),
            error=error,
            epoch=self.scope.keeper.epoch,
        )
        self.scope.event("error", "job.failed", error, {})
        self.scope.woken.set()

    async def _close(self) -> None:
        """The job is over: what is outstanding is dropped, counted, and forgotten."""
        scope = self.scope
        for seat in scope.roster.seats.values():
            pairs = [
                (item.handle, item.attempt) for item in scope.book.index.owned_by(seat.id, seat.incarnation).values()
            ]
            if pairs and seat.member.state not in ENDED:
                self.courier.abort_pairs(seat, pairs, flush=False)
        reason = scope.status.value
        await self.harvest.drop_outstanding(reason)
        if not scope.book.ended:
            await scope.keeper.propose(self.id, [ledger_pb2.Change(end=ledger_pb2.End(reason=reason))])
        counters = {**scope.book.counters, **self.harvest.totals()}
        await jobs.record_counters(scope.sessions, self.id, counters, epoch=scope.keeper.epoch)
        self.closed = True
        scope.event("info", "job.closed", f"The job is {reason}.", {"counters": counters})

    # --- what people see ----------------------------------------------------------------------------------------------

    def live(self) -> LiveJob:
        """Return the job as the API shows it while it runs."""
        within = self.scope.book.index.within
        reason, message = self.explain()
        held_up = chain(within(State.PENDING), within(State.ASSIGNED), within(State.STREAMING))
        return LiveJob(
            reason=reason,
            message=message,
            pending=len(within(State.PENDING)),
            running=len(within(State.ASSIGNED)) + len(within(State.STREAMING)),
            finished=len(within(State.FINISHED)) + len(within(State.SCORED)),
            admitted_groups=self.scope.book.next_group,
            workers_ready=len(self.scope.ready_seats()),
            counters={
                **self.scope.book.counters,
                **self.harvest.totals(),
                "reward_errors": self.harvest.reward_errors,
                "preemptions": self.harvest.preemptions,
            },
            waiting_for=[response_id(self.id, handle) for handle in islice(held_up, 20)],
        )

    def _held_up(self) -> Obstacle | None:
        """Return what from outside the job waits for, if there is anything: what everybody waits for first."""
        keeper = self.scope.keeper
        lost = self.lost_version
        return (
            keeper.log.obstacle
            or keeper.obstacle
            or self.obstacle
            or self.trainers_obstacle
            or (obstacle("WeightsLost", f"The trainer publishes version {lost} again.") if lost is not None else None)
        )

    def explain(self) -> tuple[str, str]:
        """Return why the job is where it is, as one word and one sentence."""
        row = self.scope.row
        if self.scope.status is not Status.RUNNING:
            return row.reason, row.message
        if (held_up := self._held_up()) is not None:
            return held_up.reason, held_up.message
        if row.version is None:
            return "WaitingForTrainer", "The trainer loads the model and publishes the first version."
        ready = len(self.scope.ready_seats())
        if not ready:
            seats = self.scope.roster.seats.values()
            warming = sum(seat.member.state in (WorkerState.JOINING, WorkerState.WARMING) for seat in seats)
            if warming:
                return "WarmingWorkers", f"{warming} workers fetch or load weights."
            return (
                "WaitingForWorkers",
                f"0 ready workers with engine {self.scope.engine!r}. Start one: rlharvest scale 1",
            )
        n = {state: len(self.scope.book.index.within(state)) for state in State}
        owned = n[State.ASSIGNED] + n[State.STREAMING]
        if owned:
            return "Generating", f"{owned} responses on {ready} workers, {n[State.PENDING]} wait."
        if n[State.PENDING]:
            behind = sum(seat.version != row.version for seat in self.scope.ready_seats())
            if behind:
                return "SwitchingVersion", f"{behind} of {ready} workers switch to version {row.version}."
            return "Starved", f"{n[State.PENDING]} responses wait for a worker that may serve them."
        if n[State.FINISHED]:
            return "Scoring", f"{n[State.FINISHED]} responses wait for their reward."
        if row.trainer is None:
            return "WaitingForTrainer", "The trainer is lost; the job goes on when one is there again."
        step, most = row.step + 1, self.scope.spec.limits.max_steps
        if step > most:
            return "Saving", "The last step is done; the trainer saves the model."
        return "Training", f"Step {step} of {most} computes."


def _left(change: ledger_pb2.Change) -> int | None:
    """Return the group that a change takes out of the ledger, or None."""
    match change.WhichOneof("change"):
        case "retire":
            return change.retire.group
        case "drop":
            return change.drop.group
        case _:
            return None
