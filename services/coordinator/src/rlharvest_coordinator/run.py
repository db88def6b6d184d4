"""One running job: admits groups, gives responses to workers, takes them back, and turns finished groups into batches.

The book (rlharvest.ledger) says what is; rlharvest.policies say what should be done; this shell puts the difference into the
log, one transition at a time, and acts when the log has it. Everything is level-triggered from the book, the roster and SQL:
a run that starts after a crash does what remains to be done, whatever had been done before.

Invariants: nothing is sent to a worker before the log has it; a group is in SQL before the ledger forgets it; a batch is in
SQL before the trainer hears of it; submitted = trained + dropped + outstanding at every point.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import structlog
from nats.aio.client import Client
from nats.errors import Error as NatsError
from nats.js.errors import APIError
from rlharvest.bus import GROUPS, SCORES, subject
from rlharvest.clock import Clock
from rlharvest.fleet.member import ENDED, WorkerState
from rlharvest.ids import new_id, response_id
from rlharvest.jobs.model import JobSpec
from rlharvest.jobs.state import TERMINAL, Move, Status
from rlharvest.ledger.book import Ack, Book
from rlharvest.ledger.record import Effects
from rlharvest.ledger.response import OWNED, Response, State, attempt_of
from rlharvest.ledger.response import Group as LiveGroup
from rlharvest.noise import response_seed
from rlharvest.policies import batching, blame, dispatch
from rlharvest.policies.staleness import Gate, over_age, staleness
from rlharvest.spans import Finish, ids_bytes
from rlharvest.terminal import terminal
from rlharvest.v1 import batches_pb2, fleet_pb2, ledger_pb2, spans_pb2

from rlharvest_coordinator import scoring
from rlharvest_coordinator.data.prepare import Prepared
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.live import LiveJob
from rlharvest_coordinator.log import Entry
from rlharvest_coordinator.roster import Roster, Seat
from rlharvest_coordinator.sql import Sessions
from rlharvest_coordinator.store import events, groups, jobs
from rlharvest_coordinator.tables import Group, Job, Sample

log = structlog.get_logger(__name__)

INLINE_BYTES = 256 << 10
"""Prompt and prefix of one assignment travel with it up to this size; larger ones are fetched by the worker."""

MESSAGE_BYTES = 768 << 10
"""Largest message of assignments."""

REQUEST_S = 2.0
"""How long a worker may take to answer a request."""

PAUSE_GRACE_S = 3.0
"""How long a worker may take to publish what it has when its job pauses."""


class Run:
    """A job under way. `tick` is called by the core, often and whenever something happened."""

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
        self.woken = asyncio.Event()
        self.batched = asyncio.Event()
        """Set, and replaced, whenever a group was committed to a batch."""
        self.versions: dict[int, int] = {}
        """Version -> optimizer step."""
        self.reward_errors = 0
        self.closed = False

        self._questions = scoring.Questions(self.spec)
        self._accepted: dict[int, Group] = {}
        """Complete groups in no batch yet, in order of completion."""
        self._alive: list[int] = []
        """Ordinals of all groups in SQL that are not dropped, sorted."""
        self._left: dict[int, str] = {}
        """Every group in SQL: ordinal -> state."""
        self._committed: Counter[int] = Counter()
        """Batch -> groups committed to it."""
        self._waiting_number: int | None = None
        """Transition that is in the log and not applied yet."""
        self._sent: dict[int, tuple[int, float, int]] = {}
        """handle -> (attempt, when it was sent, beats of its worker at that time)."""
        self._refused: set[tuple[int, int]] = set()
        self._progress: dict[int, float] = {}
        """handle -> when its last token came."""
        self._missing: Counter[int] = Counter()
        self._aborted_at: float | None = None
        self._sends: set[asyncio.Task[None]] = set()

    @property
    def book(self) -> Book:
        """The job's book, as it is now."""
        return self.keeper.books[self.id]

    @property
    def status(self) -> Status:
        return Status(self.row.status)

    @property
    def engine(self) -> str:
        """Engine that the job needs."""
        return "torch" if self.spec.rollout.engine == "auto" else self.spec.rollout.engine

    @property
    def active(self) -> bool:
        """Whether workers shall serve it now."""
        return self.status is Status.RUNNING and self.row.version is not None and not self.closed

    async def start(self) -> None:
        """Open the book and take over what SQL knows of the job."""
        await self.keeper.open(self.id)
        self.versions = await groups.versions(self.sessions, self.id)
        for group in await groups.all_of(self.sessions, self.id):
            self._left[group.ordinal] = group.state
            if group.state != groups.DROPPED:
                self._alive.append(group.ordinal)
            if group.state == groups.ACCEPTED:
                self._accepted[group.ordinal] = group
            if group.step is not None and group.state != groups.DROPPED:
                self._committed[group.step] += 1
        self.reward_errors = int(self.row.counters.get("reward_errors", 0))

    async def refresh(self) -> None:
        """Read the job's row again."""
        self.row = await jobs.get(self.sessions, self.id)

    def recovered(self) -> None:
        """The book was taken from the store again: nothing that was on its way counts."""
        self._waiting_number = None
        self._questions.asked.clear()

    # --- what was applied ---------------------------------------------------------------------------------------------

    async def applied(self, entries: Sequence[tuple[Entry, Effects]]) -> None:
        """Hear what the log changed."""
        now = self.clock.monotonic()
        acks: dict[tuple[str, int], spans_pb2.LedgerAck] = {}
        assigned: list[int] = []
        for entry, effects in entries:
            if effects.flush is not None:
                key = (entry.who, effects.flush.incarnation)
                ack = acks.setdefault(key, spans_pb2.LedgerAck(incarnation=effects.flush.incarnation))
                for outcome in effects.outcomes:
                    ack.handle.append(outcome.handle)
                    ack.attempt.append(outcome.attempt)
                    ack.length.append(outcome.length)
                    ack.status.append(outcome.ack.value)  # type: ignore[arg-type]  # stubs want their own alias of int
                    if outcome.ack is Ack.APPLIED:
                        self._progress[outcome.handle] = now
            if effects.transition is not None and effects.transition.epoch == self.keeper.epoch:
                if effects.transition.number == self._waiting_number:
                    self._waiting_number = None
                assigned += [change.assign.handle for change in effects.changes if change.HasField("assign")]
            if effects.score is not None:
                self._questions.asked.pop(effects.score.handle, None)
        for (worker, _incarnation), ack in acks.items():
            await self.nats.publish(subject("acks", self.id, worker), ack.SerializeToString())
        if assigned:
            self._send(assigned)
        self.woken.set()

    # --- one round ----------------------------------------------------------------------------------------------------

    async def tick(self) -> None:
        """Do what is to be done now."""
        if self.closed:
            return
        if self.status in TERMINAL:
            await self._close()
            return
        await self._ask_for_scores()
        settled = await self._settle()
        await self._form_batches()
        if self._waiting_number is not None:
            return
        changes = settled
        if self.status is Status.RUNNING:
            self._aborted_at = None
            if self.active:
                changes += [*self._orphans(), *self._conclude(), *self._admit()]
                changes += self._assign({change.orphan.handle for change in changes if change.HasField("orphan")})
        else:
            changes += await self._hand_back()
        if changes:
            await self._propose(changes)

    async def _propose(self, changes: Sequence[ledger_pb2.Change]) -> None:
        # The number is noted before the log can have it: the keeper may apply it while the publication is acknowledged.
        self._waiting_number = self.keeper.next_number(self.id)
        await self.keeper.propose(self.id, changes)

    def _seat(self, response: Response) -> Seat | None:
        seat = self.roster.seats.get(response.worker)
        return seat if seat is not None and seat.incarnation == response.incarnation else None

    def _owned(self) -> Iterable[Response]:
        return (response for response in self.book.responses.values() if response.state in OWNED)

    def _orphans(self) -> list[ledger_pb2.Change]:
        now = self.clock.monotonic()
        changes = []
        for response in self._owned():
            reason = self._lost(response, now)
            if reason is not None:
                changes.append(_orphan(response, reason))
                self._missing.pop(response.handle, None)
                seat = self._seat(response)
                if seat is not None and seat.member.state not in ENDED:
                    self._abort(seat, [response], flush=False)
        if changes:
            self._tell_orphans(changes)
        return changes

    def _lost(self, response: Response, now: float) -> ledger_pb2.OrphanReason | None:
        seat = self._seat(response)
        if seat is None:
            known = self.roster.seats.get(response.worker)
            rejoined = known is not None and known.incarnation > response.incarnation
            return ledger_pb2.ORPHAN_REASON_REJOINED if rejoined else ledger_pb2.ORPHAN_REASON_DEAD
        if seat.member.state is WorkerState.DEAD:
            return ledger_pb2.ORPHAN_REASON_DEAD
        if seat.member.state is WorkerState.GONE:
            return ledger_pb2.ORPHAN_REASON_DRAINED
        if (response.handle, response.attempt) in self._refused:
            self._refused.discard((response.handle, response.attempt))
            return ledger_pb2.ORPHAN_REASON_REFUSED
        if self._missing[response.handle] >= 2:
            return ledger_pb2.ORPHAN_REASON_MISSING
        last = self._progress.setdefault(response.handle, now)
        if now - last > self.spec.rollout.progress_deadline_s:
            return ledger_pb2.ORPHAN_REASON_STALLED
        return None

    def _tell_orphans(self, changes: Sequence[ledger_pb2.Change]) -> None:
        by_worker: dict[tuple[str, int], list[int]] = {}
        for change in changes:
            response = self.book.responses[change.orphan.handle]
            by_worker.setdefault((response.worker, change.orphan.reason), []).append(response.length)
        for (worker, reason), lengths in by_worker.items():
            name = ledger_pb2.OrphanReason.Name(reason).removeprefix("ORPHAN_REASON_").lower()
            self.event(
                "warn" if name in ("dead", "missing", "stalled") else "info",
                "response.orphaned",
                f"{len(lengths)} responses with {sum(lengths)} tokens go on elsewhere: worker {worker} {_SAYS[name]}.",
                {"worker": worker, "reason": name, "responses": len(lengths), "tokens": sum(lengths)},
            )

    def beat(self, seat: Seat) -> None:
        """A worker of this job sent a heartbeat: compare what it holds with what the book says."""
        if self.closed or self.id not in self.keeper.books:
            return
        book = self.book
        strangers: list[tuple[int, int]] = []
        for handle, attempt in seat.held.items():
            response = book.responses.get(handle)
            if response is None or response.attempt != attempt:
                strangers.append((handle, attempt))
            elif response.state not in OWNED:
                self._acknowledge(seat, response)
        if strangers and seat.job == self.id:
            self._abort_pairs(seat, strangers, flush=False)
        for response in book.owned_by(seat.id, seat.incarnation):
            if seat.held.get(response.handle) == response.attempt:
                self._missing.pop(response.handle, None)
                continue
            sent = self._sent.get(response.handle)
            if sent is None or sent[0] != response.attempt:
                # Assigned by an earlier coordinator, or never sent: its worker shows it within two beats or not at all.
                self._sent[response.handle] = (response.attempt, self.clock.monotonic(), seat.beats)
            elif seat.beats > sent[2] + 1 and self.clock.monotonic() - sent[1] > self.roster.timing.heartbeat_s:
                self._missing[response.handle] += 1
                self.woken.set()

    def _acknowledge(self, seat: Seat, response: Response) -> None:
        ack = spans_pb2.LedgerAck(
            incarnation=seat.incarnation,
            handle=[response.handle],
            attempt=[response.attempt],
            length=[response.length],
            status=[spans_pb2.ACK_STATUS_APPLIED],
        )
        self._later(self.nats.publish(subject("acks", self.id, seat.id), ack.SerializeToString()))

    def _conclude(self) -> list[ledger_pb2.Change]:
        changes = []
        for response in self.book.responses.values():
            if response.state is State.PENDING and response.length:
                finish = self._terminal(response)
                if finish is not Finish.NONE:
                    value = ledger_pb2.Conclude(handle=response.handle, finish=finish.value)  # type: ignore[arg-type]  # alias
                    changes.append(ledger_pb2.Change(conclude=value))
        return changes

    def _terminal(self, response: Response) -> Finish:
        ids = response.ids.tolist()
        stop = self.spec.sampling.stop
        return terminal(
            ids,
            eos_ids=self.prepared.tokenizer.eos_ids,
            budget=response.budget,
            stop=stop,
            text=self.prepared.tokenizer.decode(ids) if stop else None,
        )

    def _admit(self) -> list[ledger_pb2.Change]:
        book = self.book
        room = self.gate.room(counted=len(self._alive) + len(book.groups), step=self.row.step)
        if not room or not self._ready_seats():
            return []
        n = self.spec.sampling.num_generations
        first = max(book.next_group, max(self._left, default=-1) + 1)
        changes = []
        for ordinal in range(first, first + room):
            row, data_epoch = self.prepared.order.row(ordinal)
            admit = ledger_pb2.Admit(
                group=ordinal,
                first_handle=ordinal * n,
                n=n,
                budget=self.spec.sampling.max_completion_length,
                prompt=row,
                data_epoch=data_epoch,
            )
            changes.append(ledger_pb2.Change(admit=admit))
        return changes

    def _ready_seats(self) -> list[Seat]:
        return [
            seat
            for seat in self.roster.seats.values()
            if seat.member.state is WorkerState.READY and seat.job == self.id and seat.version in self.versions
        ]

    def rank(self, ordinal: int) -> int:
        """Return the place of a group among those that count (not dropped), in order of admission."""
        return bisect.bisect_left(self._alive, ordinal) + sum(1 for other in self.book.groups if other < ordinal)

    def _oldest_step(self, ordinal: int) -> int:
        if self.spec.staleness.order == "completion":
            return max(0, self.row.step - self.spec.staleness.max_staleness)
        return self.gate.oldest_step(self.rank(ordinal))

    def _assign(self, leaving: set[int]) -> list[ledger_pb2.Change]:
        book = self.book
        pending = [response for response in book.responses.values() if response.state is State.PENDING]
        seats = self._ready_seats()
        if not pending or not seats:
            return []
        held: Counter[str] = Counter()
        alone: set[str] = set()
        for response in self._owned():
            if response.handle not in leaving:
                held[response.worker] += 1
                if blame.suspected(response.deaths):
                    alone.add(response.worker)
        most = self.spec.rollout.max_inflight_per_worker
        candidates = [
            dispatch.Candidate(
                worker=seat.id,
                slots=min(seat.slots, most),
                held=held[seat.id],
                step=self.versions[seat.version],
                version=seat.version,
                quarantined=seat.id in alone,
            )
            for seat in seats
            if seat.version is not None
        ]
        oldest = {ordinal: self._oldest_step(ordinal) for ordinal in {response.group for response in pending}}
        waiting = [
            dispatch.Waiting(
                handle=response.handle,
                min_step=oldest[response.group],
                min_version=response.last_version or 0,
                suspected=blame.suspected(response.deaths),
            )
            # What was started goes first: its tokens are paid for and its group waits for it.
            for response in sorted(pending, key=lambda item: (item.group, -item.length, item.handle))
        ]
        incarnations = {seat.id: seat.incarnation for seat in seats}
        return [
            ledger_pb2.Change(
                assign=ledger_pb2.Assign(
                    handle=handle,
                    attempt=attempt_of(self.keeper.epoch, book.responses[handle].serial + 1),
                    worker=worker,
                    incarnation=incarnations[worker],
                )
            )
            for handle, worker in dispatch.assign(waiting, candidates)
        ]

    async def _hand_back(self) -> list[ledger_pb2.Change]:
        """The job pauses, is paused, waits or is cancelled: workers publish what they have and let go."""
        now = self.clock.monotonic()
        owned = list(self._owned())
        if not owned:
            return []
        if self._aborted_at is None:
            self._aborted_at = now
            by_seat: dict[str, list[Response]] = {}
            for response in owned:
                if self._seat(response) is not None:
                    by_seat.setdefault(response.worker, []).append(response)
            for worker, responses in by_seat.items():
                self._abort(self.roster.seats[worker], responses, flush=True)
        late = now - self._aborted_at > PAUSE_GRACE_S
        changes = []
        for response in owned:
            seat = self._seat(response)
            released = seat is None or seat.member.state in ENDED or response.handle not in seat.held
            if late or (released and now - self._aborted_at > 2 * self.roster.timing.heartbeat_s):
                changes.append(_orphan(response, ledger_pb2.ORPHAN_REASON_PAUSED))
        return changes

    # --- messages to workers ------------------------------------------------------------------------------------------

    def _later(self, coroutine: Any) -> None:
        task = asyncio.ensure_future(coroutine)
        self._sends.add(task)
        task.add_done_callback(self._sent_off)

    def _sent_off(self, task: asyncio.Task[None]) -> None:
        self._sends.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.warning("worker.message_failed", job=self.id, error=repr(error))

    def _send(self, handles: Sequence[int]) -> None:
        by_seat: dict[str, list[Response]] = {}
        now = self.clock.monotonic()
        for handle in handles:
            response = self.book.responses.get(handle)
            seat = self._seat(response) if response is not None else None
            if response is not None and seat is not None and response.state in OWNED:
                self._sent[handle] = (response.attempt, now, seat.beats)
                self._progress[handle] = now
                self._missing.pop(handle, None)
                by_seat.setdefault(seat.id, []).append(response)
        for worker, responses in by_seat.items():
            seat = self.roster.seats[worker]
            for message in self._messages(seat, responses):
                self._later(self._request(seat, message))

    def _messages(self, seat: Seat, responses: Sequence[Response]) -> Iterable[fleet_pb2.Assignments]:
        batch: list[fleet_pb2.Assignment] = []
        size = 0
        for response in responses:
            assignment = self._assignment(response)
            if batch and size + assignment.ByteSize() > MESSAGE_BYTES:
                yield self._assignments(seat, batch)
                batch, size = [], 0
            batch.append(assignment)
            size += assignment.ByteSize()
        yield self._assignments(seat, batch)

    def _assignments(self, seat: Seat, batch: Sequence[fleet_pb2.Assignment]) -> fleet_pb2.Assignments:
        sampling, tokenizer = self.spec.sampling, self.prepared.tokenizer
        return fleet_pb2.Assignments(
            epoch=self.keeper.epoch,
            incarnation=seat.incarnation,
            sampling=fleet_pb2.Sampling(
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                top_k=sampling.top_k,
                min_p=sampling.min_p,
                eos_ids=sorted(tokenizer.eos_ids),
                stop=sampling.stop,
                vocab=tokenizer.vocab,
            ),
            assignments=batch,
        )

    def _assignment(self, response: Response) -> fleet_pb2.Assignment:
        group = self.book.groups[response.group]
        prompt, prefix = ids_bytes(self.prepared.dataset.prompt_ids(group.prompt)), ids_bytes(response.ids)
        large = len(prompt) + len(prefix) > INLINE_BYTES
        return fleet_pb2.Assignment(
            handle=response.handle,
            attempt=response.attempt,
            group=group.ordinal,
            seed=response_seed(
                self.spec.sampling_seed, group.prompt, group.data_epoch, response.handle - group.first_handle
            ),
            budget=response.budget,
            prompt=b"" if large else prompt,
            prefix=b"" if large else prefix,
            prefix_length=response.length,
            prefix_by_reference=large,
            min_version=response.last_version or 0,
        )

    def prefix(self, handle: int, attempt: int) -> fleet_pb2.GetPrefixReply | None:
        """Return the tokens of a response to its owner."""
        response = self.book.responses.get(handle)
        if response is None or response.attempt != attempt:
            return None
        group = self.book.groups[response.group]
        return fleet_pb2.GetPrefixReply(
            prompt=ids_bytes(self.prepared.dataset.prompt_ids(group.prompt)), prefix=ids_bytes(response.ids)
        )

    async def _request(self, seat: Seat, message: fleet_pb2.Assignments) -> None:
        try:
            answer = await self.nats.request(
                subject("assign", self.id, seat.id), message.SerializeToString(), timeout=REQUEST_S
            )
        except (TimeoutError, NatsError):
            return  # it shows in its heartbeats whether it has them
        reply = fleet_pb2.AssignReply.FromString(answer.data)
        refused = {item.handle for item in message.assignments} if not reply.accepted else set(reply.refused)
        if refused:
            log.info("worker.refused", job=self.id, worker=seat.id, responses=len(refused), reason=reply.reason)
            self._refused |= {(item.handle, item.attempt) for item in message.assignments if item.handle in refused}
            self.woken.set()

    def _abort(self, seat: Seat, responses: Sequence[Response], *, flush: bool) -> None:
        self._abort_pairs(seat, [(response.handle, response.attempt) for response in responses], flush=flush)

    def _abort_pairs(self, seat: Seat, pairs: Sequence[tuple[int, int]], *, flush: bool) -> None:
        order = fleet_pb2.Abort(
            epoch=self.keeper.epoch,
            incarnation=seat.incarnation,
            handle=[handle for handle, _ in pairs],
            attempt=[attempt for _, attempt in pairs],
            flush=flush,
        )
        self._later(self.nats.publish(subject("abort", self.id, seat.id), order.SerializeToString()))

    # --- from finished responses to batches ---------------------------------------------------------------------------

    async def _ask_for_scores(self) -> None:
        now = self.clock.monotonic()
        for response in list(self.book.responses.values()):
            if response.state is not State.FINISHED:
                continue
            number = self._questions.due(response.handle, now)
            group = self.book.groups.get(response.group)
            if number is None or group is None:
                continue
            question = scoring.request(self.id, self.spec, self.prepared, group, response, step=self.row.step)
            # The epoch is in the id: a new coordinator's question must not pass for the old one's duplicate.
            identity = f"{self.id}:{response.handle}:{question.reward_digest}:{self.keeper.epoch}.{number}"
            try:
                await self.js.publish(
                    subject("score", self.id, "reward"),
                    question.SerializeToString(),
                    headers={"Nats-Msg-Id": identity},
                    stream=SCORES,
                )
            except (TimeoutError, NatsError, APIError) as error:
                log.warning("scores.publish_failed", job=self.id, error=repr(error))
                return  # the next round asks
            self._questions.asked[response.handle] = (now, number)

    async def _settle(self) -> list[ledger_pb2.Change]:
        """Write complete groups to SQL and let the ledger forget them; drop those that cannot be trained."""
        book = self.book
        changes = []
        for group in list(book.groups.values()):
            if group.ordinal in self._left:
                # In SQL already, by a coordinator that did not live to say so.
                changes.append(_leave(group.ordinal, self._left[group.ordinal]))
                continue
            responses = list(book.of(group))
            problem = self._problem(responses)
            if problem is not None:
                await self._drop_live(group, *problem)
                changes.append(_leave(group.ordinal, groups.DROPPED))
            elif all(response.state is State.SCORED for response in responses):
                await self._accept(group, responses)
                changes.append(_leave(group.ordinal, groups.ACCEPTED))
        return changes if self._waiting_number is None else []

    def _problem(self, responses: Sequence[Response]) -> tuple[str, str, dict[str, Any]] | None:
        """Return why a group can never be trained: (reason, sentence, details)."""
        vocab = self.prepared.tokenizer.vocab
        for response in responses:
            name = response_id(self.id, response.handle)
            if response.score is not None and response.score.HasField("error"):
                error = response.score.error
                details = {"function": error.function, "kind": error.kind, "sample": error.sample, "response": name}
                return "reward_error", f"Reward function {error.function!r}: {error.message}", details
            if response.state in (State.FINISHED, State.SCORED) and response.length and response.ids.max() >= vocab:
                worst = int(response.ids.max())
                sentence = f"Response {name} holds token id {worst}; the tokenizer has {vocab} ids."
                return "bad_token", sentence, {"response": name, "id": worst}
            if blame.condemned(response.deaths):
                sentence = f"{response.deaths} workers in a row died on response {name} before its next token."
                return "poison", sentence, {"response": name, "deaths": response.deaths}
        return None

    async def _drop_live(self, group: LiveGroup, reason: str, sentence: str, details: dict[str, Any]) -> None:
        row = self._row_of(group, state=groups.DROPPED, reason=reason)
        if not await groups.record(self.sessions, row, [], epoch=self.keeper.epoch):
            return
        self._left[group.ordinal] = groups.DROPPED
        level = "error" if reason == "reward_error" else "warn"
        self.event(level, f"group.{reason}", f"Group {group.ordinal} is dropped. {sentence}", details)
        if reason == "reward_error":
            self.reward_errors += 1
            await jobs.record_counters(
                self.sessions, self.id, {"reward_errors": self.reward_errors}, epoch=self.keeper.epoch
            )
            if self.reward_errors > self.spec.limits.max_reward_errors:
                await self.fail(
                    f"{self.reward_errors} rewards failed (limits.max_reward_errors = "
                    f"{self.spec.limits.max_reward_errors}). The last one: {sentence}"
                )

    def _row_of(self, group: LiveGroup, *, state: str, reason: str | None = None) -> Group:
        responses = list(self.book.of(group))
        rewards = [response.score.reward for response in responses if response.score is not None]
        scored = state == groups.ACCEPTED
        mean = sum(rewards) / len(rewards) if scored else None
        oldest = [response.oldest_version for response in responses if response.oldest_version is not None]
        newest = [response.last_version for response in responses if response.last_version is not None]
        return Group(
            job=self.id,
            ordinal=group.ordinal,
            state=state,
            reason=reason,
            prompt=group.prompt,
            data_epoch=group.data_epoch,
            tokens=sum(response.length for response in responses),
            reward_mean=mean,
            reward_std=(sum((value - mean) ** 2 for value in rewards) / len(rewards)) ** 0.5
            if mean is not None
            else None,
            oldest_version=min(oldest, default=None),
            newest_version=max(newest, default=None),
            masked=False,
            at=self.clock.time(),
        )

    async def _accept(self, group: LiveGroup, responses: Sequence[Response]) -> None:
        row = self._row_of(group, state=groups.ACCEPTED)
        samples = [self.sample(group, response) for response in responses]
        await groups.record(self.sessions, row, samples, epoch=self.keeper.epoch)
        self._left[group.ordinal] = groups.ACCEPTED
        bisect.insort(self._alive, group.ordinal)
        self._accepted[group.ordinal] = row
        for response in responses:
            for table in (self._sent, self._progress, self._questions.asked):
                table.pop(response.handle, None)  # type: ignore[attr-defined]  # three dicts of different values

    def sample(self, group: LiveGroup, response: Response) -> Sample:
        """Return a response as SQL keeps it."""
        pieces, at = [], 0
        for piece in response.pieces:
            pieces.append([at, piece.n, str(piece.attempt), piece.worker])
            at += piece.n
        score = response.score
        return Sample(
            job=self.id,
            handle=response.handle,
            response_id=response_id(self.id, response.handle),
            group=group.ordinal,
            finish=response.finish.name.lower(),
            ids=ids_bytes(response.ids),
            logprobs=response.logprobs.astype("<f4").tobytes(),
            runs=[[run.n, run.version] for run in response.runs],
            pieces=pieces,
            prompt_text=self.prepared.dataset.prompt_text(group.prompt).replace("\0", "\N{REPLACEMENT CHARACTER}"),
            text=self.prepared.tokenizer.decode(response.ids.tolist()).replace("\0", "\N{REPLACEMENT CHARACTER}"),
            reward=score.reward if score is not None else 0.0,
            components=[
                [item.name, item.value if item.HasField("value") else None, item.weight]
                for item in (score.components if score is not None else ())
            ],
            at=self.clock.time(),
        )

    async def _form_batches(self) -> None:
        size = self.spec.algorithm.prompts_per_step
        step = self._open_batch(size)
        while self._accepted:
            chosen = batching.commit(
                running=self.book.groups.keys() - self._left.keys(),
                accepted=list(self._accepted),
                committed=self._committed[step],
                size=size,
                order=self.spec.staleness.order,
            )
            if not chosen:
                return
            stale = [ordinal for ordinal in chosen if self._age(ordinal, step) > self.spec.staleness.max_staleness]
            if stale and self.spec.staleness.on_stale == "drop":
                await self._drop_stale(stale, step)
                continue
            await self._commit(chosen, step)
            step = self._open_batch(size)

    def _open_batch(self, size: int) -> int:
        step = max(self._committed, default=0)
        return step + 1 if self._committed[step] >= size else step

    def _age(self, ordinal: int, step: int) -> int:
        version = self._accepted[ordinal].oldest_version
        return staleness(batch=step, oldest_step=self.versions.get(version, 0) if version is not None else step)

    async def _drop_stale(self, ordinals: Sequence[int], step: int) -> None:
        await groups.drop(self.sessions, self.id, ordinals, "stale", epoch=self.keeper.epoch)
        for ordinal in ordinals:
            row = self._accepted.pop(ordinal)
            self._alive.remove(ordinal)
            self._left[ordinal] = groups.DROPPED
            self.event(
                "warn",
                "group.stale",
                f"Group {ordinal} with {row.tokens} tokens is dropped: too old for batch {step}.",
                {"group": ordinal, "step": step, "tokens": row.tokens, "oldest_version": row.oldest_version},
            )

    async def _commit(self, ordinals: Sequence[int], step: int) -> None:
        bound = self.spec.staleness.max_staleness
        first = self._committed[step]
        commitments = [
            groups.Commitment(
                ordinal=ordinal,
                step=step,
                position=first + index,
                staleness=self._age(ordinal, step),
                masked=over_age(self._age(ordinal, step), max_staleness=bound)
                and self.spec.staleness.on_stale == "mask",
            )
            for index, ordinal in enumerate(ordinals)
        ]
        await groups.commit(self.sessions, self.id, commitments, epoch=self.keeper.epoch)
        self._committed[step] += len(ordinals)
        for item in commitments:
            row = self._accepted.pop(item.ordinal)
            self._left[item.ordinal] = groups.COMMITTED
            pointer = batches_pb2.GroupComplete(
                job=self.id,
                step=step,
                group=item.ordinal,
                position=item.position,
                staleness=item.staleness,
                oldest_version=row.oldest_version or 0,
                newest_version=row.newest_version or 0,
                tokens=row.tokens,
                reward_mean=row.reward_mean or 0.0,
            )
            # A wake-up: the trainer looks by itself, should it get lost.
            await self._wake_trainer(pointer)
        batched, self.batched = self.batched, asyncio.Event()
        batched.set()

    async def _wake_trainer(self, pointer: batches_pb2.GroupComplete) -> None:
        try:
            await self.js.publish(
                subject("groups", self.id),
                pointer.SerializeToString(),
                headers={"Nats-Msg-Id": f"{self.id}:{pointer.group}"},
                stream=GROUPS,
            )
        except (TimeoutError, NatsError, APIError) as error:
            log.warning("groups.publish_failed", job=self.id, error=repr(error))

    def committed(self, step: int) -> int:
        """Return how many groups of a batch are committed."""
        return self._committed[step]

    async def trained(self, step: int) -> None:
        """A durable checkpoint covers the batches below `step`."""
        await groups.train(self.sessions, self.id, below=step, epoch=self.keeper.epoch)
        for group in await groups.all_of(self.sessions, self.id):
            self._left[group.ordinal] = group.state

    # --- ends ---------------------------------------------------------------------------------------------------------

    async def fail(self, error: str) -> None:
        """End the job: it cannot go on."""
        self.row = await jobs.move(
            self.sessions, self.id, Move.FAIL, now=self.clock.time(), error=error, epoch=self.keeper.epoch
        )
        self.event("error", "job.failed", error, {})
        self.woken.set()

    async def _close(self) -> None:
        """The job is over: what is outstanding is dropped, counted, and forgotten."""
        reason = self.status.value
        for seat in self.roster.seats.values():
            pairs = [(item.handle, item.attempt) for item in self.book.owned_by(seat.id, seat.incarnation)]
            if pairs and seat.member.state not in ENDED:
                self._abort_pairs(seat, pairs, flush=False)
        for group in list(self.book.groups.values()):
            if group.ordinal not in self._left:
                row = self._row_of(group, state=groups.DROPPED, reason=reason)
                await groups.record(self.sessions, row, [], epoch=self.keeper.epoch)
                self._left[group.ordinal] = groups.DROPPED
        if self._accepted:
            await groups.drop(self.sessions, self.id, list(self._accepted), reason, epoch=self.keeper.epoch)
            for ordinal in self._accepted:
                self._left[ordinal] = groups.DROPPED
            self._accepted.clear()
        if not self.book.ended:
            await self.keeper.propose(self.id, [ledger_pb2.Change(end=ledger_pb2.End(reason=reason))])
        counters = {**self.book.counters, **self.totals()}
        await jobs.record_counters(self.sessions, self.id, counters, epoch=self.keeper.epoch)
        self.closed = True
        batched, self.batched = self.batched, asyncio.Event()
        batched.set()
        self.event("info", "job.closed", f"The job is {reason}.", {"counters": counters})

    # --- what people see ----------------------------------------------------------------------------------------------

    def event(self, level: str, kind: str, message: str, data: dict[str, Any]) -> None:
        """Write an event."""
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
        self._later(events.append(self.sessions, [item]))

    def totals(self) -> dict[str, int]:
        """Return the responses of the job by where they are: submitted = trained + dropped + outstanding."""
        n = self.spec.sampling.num_generations
        by_state = Counter(self._left.values())
        live = sum(group.n for group in self.book.groups.values() if group.ordinal not in self._left)
        submitted = n * len(self._left) + live
        trained, dropped = n * by_state[groups.TRAINED], n * by_state[groups.DROPPED]
        return {
            "submitted": submitted,
            "trained": trained,
            "dropped": dropped,
            "outstanding": submitted - trained - dropped,
        }

    def live(self) -> LiveJob:
        """Return the job as the API shows it while it runs."""
        by_state = Counter(response.state for response in self.book.responses.values())
        reason, message = self.explain()
        held_up = [response for response in self.book.responses.values() if response.state in (State.PENDING, *OWNED)]
        return LiveJob(
            reason=reason,
            message=message,
            pending=by_state[State.PENDING],
            running=by_state[State.ASSIGNED] + by_state[State.STREAMING],
            finished=by_state[State.FINISHED] + by_state[State.SCORED],
            admitted_groups=self.book.next_group,
            workers_ready=len(self._ready_seats()),
            counters={**self.book.counters, **self.totals(), "reward_errors": self.reward_errors},
            waiting_for=[response_id(self.id, response.handle) for response in held_up[:20]],
        )

    def explain(self) -> tuple[str, str]:
        """Return why the job is where it is, as one word and one sentence."""
        if self.status is not Status.RUNNING:
            return self.row.reason, self.row.message
        if self.row.version is None:
            return "WaitingForTrainer", "The trainer loads the model and publishes the first version."
        ready = len(self._ready_seats())
        if not ready:
            mine = [seat for seat in self.roster.seats.values() if seat.member.state not in ENDED]
            warming = [seat for seat in mine if seat.member.state in (WorkerState.JOINING, WorkerState.WARMING)]
            if warming:
                return "WarmingWorkers", f"{len(warming)} workers fetch or load weights."
            return "WaitingForWorkers", f"0 ready workers with engine {self.engine!r}. Start one: rlharvest scale 1"
        by_state = Counter(response.state for response in self.book.responses.values())
        owned = by_state[State.ASSIGNED] + by_state[State.STREAMING]
        if owned:
            return "Generating", f"{owned} responses on {ready} workers, {by_state[State.PENDING]} wait."
        if by_state[State.PENDING]:
            return "Starved", f"{by_state[State.PENDING]} responses wait for a worker that serves a new enough version."
        if by_state[State.FINISHED]:
            return "Scoring", f"{by_state[State.FINISHED]} responses wait for their reward."
        return "Training", f"Step {self.row.step + 1} of {self.spec.limits.max_steps} computes."


def _orphan(response: Response, reason: ledger_pb2.OrphanReason) -> ledger_pb2.Change:
    return ledger_pb2.Change(orphan=ledger_pb2.Orphan(handle=response.handle, attempt=response.attempt, reason=reason))


def _leave(ordinal: int, state: str) -> ledger_pb2.Change:
    if state == groups.DROPPED:
        return ledger_pb2.Change(drop=ledger_pb2.Drop(group=ordinal))
    return ledger_pb2.Change(retire=ledger_pb2.Retire(group=ordinal))


_LEVELS = {"info": 20, "warn": 30, "error": 40}

_SAYS = {
    "dead": "sent no heartbeat",
    "drained": "handed them back",
    "missing": "does not hold them",
    "stalled": "made no progress",
    "refused": "refused them",
    "paused": "let go of them",
    "rejoined": "joined again",
    "migrated": "makes room",
}
