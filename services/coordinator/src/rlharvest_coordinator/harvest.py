"""From finished responses to complete groups in SQL: rewards are asked for, and what is complete leaves the ledger.

Invariants: a group is in SQL before the ledger forgets it; a group that cannot be trained is dropped, counted and replaced,
and says why. What becomes of a group then is the open batch's and the tally's.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from typing import Any

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import APIError
from rlharvest.bus import MAX_PAYLOAD_BYTES, SCORES, subject
from rlharvest.ids import response_id
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import Group as LiveGroup
from rlharvest.ledger.response import Response, State
from rlharvest.policies import blame
from rlharvest.v1 import ledger_pb2

from rlharvest_coordinator import scoring
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.open_batch import OpenBatch
from rlharvest_coordinator.records import group_row, sample_row
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import groups, jobs
from rlharvest_coordinator.tally import Tally

log = structlog.get_logger(__name__)

HEADROOM_BYTES = 4096
"""For subject and headers of a message."""


class Harvest:
    """What one job has brought in."""

    def __init__(self, scope: Scope, courier: Courier) -> None:
        self.scope = scope
        self.courier = courier
        self.questions = scoring.Questions(scope.spec)
        self.open_batch = OpenBatch(scope, self.running)
        self.reward_errors = 0
        self.preemptions = 0
        """Workers of this job that died or left."""
        self.failure = ""
        """Why the job cannot go on."""
        self._too_large: dict[int, int] = {}
        """handle -> bytes of a question for its reward that no message can hold."""
        self._settled: set[int] = set()
        self._settled_of: Book | None = None
        """The book that `_settled` is of."""
        self._reading = asyncio.Lock()
        """Held while the tally follows SQL: what is trained must not fall between a read of all and its counting."""

    @property
    def tally(self) -> Tally:
        """What became of the groups that left the ledger."""
        return self.open_batch.tally

    @property
    def settled(self) -> set[int]:
        """The groups that are in SQL and not yet out of the ledger."""
        book = self.scope.book
        if self._settled_of is not book:
            self._settled = {ordinal for ordinal in book.groups if ordinal in self.tally}
            self._settled_of = book
        self._settled &= book.groups.keys()
        return self._settled

    def running(self) -> set[int]:
        """Return the groups that are in the ledger and not in SQL."""
        return self.scope.book.groups.keys() - self.settled

    async def start(self) -> None:
        """Take over what SQL knows of the job; after a fault of SQL, once more."""
        async with self._reading:
            tally, newest, filled = Tally(), 0, 0
            async for ordinal, state, step, tokens in groups.all_of(self.scope.sessions, self.scope.id):
                tally.record(ordinal, state, tokens)
                if step is not None and state != groups.DROPPED and step >= newest:
                    newest, filled = step, filled + 1 if step == newest else 1
            accepted = await groups.accepted(self.scope.sessions, self.scope.id)
            self.open_batch.load(tally, accepted, step=newest, filled=filled)
            self._settled_of = None
        self.reward_errors = int(self.scope.row.counters.get("reward_errors", 0))
        self.preemptions = int(self.scope.row.counters.get("preemptions", 0))

    def forget(self, handle: int) -> None:
        """A response left the ledger."""
        self.questions.asked.pop(handle, None)
        self._too_large.pop(handle, None)

    async def ask_for_scores(self) -> None:
        """Ask the reward service for what is finished and was not asked for, or not answered in time."""
        now = self.scope.clock.monotonic()
        for response in list(self.scope.book.index.within(State.FINISHED).values()):
            number = self.questions.due(response.handle, now)
            group = self.scope.book.groups.get(response.group)
            if number is None or group is None:
                continue
            # The epoch is in its name: a new coordinator's question must not pass for the old one's duplicate.
            name = f"{self.scope.keeper.epoch}.{number}"
            question = scoring.request(
                self.scope.id,
                self.scope.spec,
                self.scope.prepared,
                group,
                response,
                step=self.scope.row.step,
                question=name,
            )
            if question.ByteSize() > MAX_PAYLOAD_BYTES - HEADROOM_BYTES:
                self._too_large[response.handle] = question.ByteSize()
                self.questions.asked[response.handle] = (now, number)
                continue
            identity = f"{self.scope.id}:{response.handle}:{question.reward_digest}:{name}"
            try:
                await self.scope.js.publish(
                    subject("score", self.scope.id, "reward"),
                    question.SerializeToString(),
                    headers={"Nats-Msg-Id": identity},
                    stream=SCORES,
                )
            except (TimeoutError, NatsError, APIError) as error:
                log.warning("scores.publish_failed", job=self.scope.id, error=repr(error))
                return  # the next round asks
            self.questions.asked[response.handle] = (now, number)

    async def settle(self) -> list[ledger_pb2.Change]:
        """Write complete groups to SQL and let the ledger forget them; drop those that cannot be trained."""
        book = self.scope.book
        changes = []
        for group in self._ripe(book):
            if group.ordinal in self.tally:
                # In SQL already: the log does not have yet, or a coordinator did not live to say, that it left.
                changes.append(_leave(group.ordinal, dropped=self.tally.dropped(group.ordinal)))
                continue
            if self.scope.book is not book:
                return []  # a recovery replaced it: the next round looks at the new one
            responses = list(book.of(group))
            problem = self._problem(responses)
            if problem is not None:
                await self._drop_live(group, responses, *problem)
                changes.append(_leave(group.ordinal, dropped=True))
            elif all(response.state is State.SCORED for response in responses):
                await self._accept(group, responses)
                changes.append(_leave(group.ordinal, dropped=False))
        return changes

    def _ripe(self, book: Book) -> list[LiveGroup]:
        """Return the live groups that may be ready to leave the ledger, in order."""
        scored: Counter[int] = Counter()
        found = set(self.settled)
        for response in book.index.within(State.SCORED).values():
            scored[response.group] += 1
            if response.score is not None and response.score.HasField("error"):
                found.add(response.group)
        found |= {ordinal for ordinal, n in scored.items() if n == book.groups[ordinal].n}
        found |= {response.group for response in book.index.blamed.values() if response.group in book.groups}
        found |= {book.responses[handle].group for handle in self._too_large if handle in book.responses}
        return [book.groups[ordinal] for ordinal in sorted(found)]

    def _problem(self, responses: Sequence[Response]) -> tuple[str, str, dict[str, Any]] | None:
        """Return why a group can never be trained: (reason, sentence, details)."""
        vocab = self.scope.prepared.tokenizer.vocab
        complete = all(response.state is State.SCORED for response in responses)
        for response in responses:
            name = response_id(self.scope.id, response.handle)
            if response.score is not None and response.score.HasField("error"):
                error = response.score.error
                details = {"function": error.function, "kind": error.kind, "sample": error.sample, "response": name}
                return "reward_error", f"Reward function {error.function!r}: {error.message}", details
            if complete and response.length and (worst := int(response.ids.max())) >= vocab:
                sentence = f"Response {name} holds token id {worst}; the tokenizer has {vocab} ids."
                return "bad_token", sentence, {"response": name, "id": worst}
            if (size := self._too_large.get(response.handle, 0)) > 0:
                sentence = (
                    f"Response {name} with the columns of its dataset row makes a message of {size} bytes; NATS takes "
                    f"{MAX_PAYLOAD_BYTES}. Leave out large columns of the dataset."
                )
                return "too_large", sentence, {"response": name, "bytes": size}
            if blame.condemned(response.deaths):
                sentence = f"{response.deaths} workers in a row died on response {name} before its next token."
                return "poison", sentence, {"response": name, "deaths": response.deaths}
        return None

    async def _drop_live(
        self, group: LiveGroup, responses: Sequence[Response], reason: str, sentence: str, details: dict[str, Any]
    ) -> None:
        row = group_row(self.scope, group, responses, state=groups.DROPPED, reason=reason)
        if not await groups.record(self.scope.sessions, row, [], epoch=self.scope.keeper.epoch):
            return
        self._record(group, groups.DROPPED)
        level = "error" if reason == "reward_error" else "warn"
        self.scope.event(level, f"group.{reason}", f"Group {group.ordinal} is dropped. {sentence}", details)
        if reason == "reward_error":
            self.reward_errors += 1
            await jobs.record_counters(
                self.scope.sessions, self.scope.id, {"reward_errors": self.reward_errors}, epoch=self.scope.keeper.epoch
            )
            if self.reward_errors > self.scope.spec.limits.max_reward_errors:
                self.failure = (
                    f"{self.reward_errors} rewards failed (limits.max_reward_errors = "
                    f"{self.scope.spec.limits.max_reward_errors}). The last one: {sentence}"
                )

    async def _accept(self, group: LiveGroup, responses: Sequence[Response]) -> None:
        row = group_row(self.scope, group, responses, state=groups.ACCEPTED)
        samples = [sample_row(self.scope, group, response) for response in responses]
        await groups.record(self.scope.sessions, row, samples, epoch=self.scope.keeper.epoch)
        self._record(group, groups.ACCEPTED)
        self.open_batch.accept(row)

    def _record(self, group: LiveGroup, state: str) -> None:
        self.tally.record(group.ordinal, state)
        self.settled.add(group.ordinal)

    async def form_batches(self) -> None:
        """Put complete groups into batches, as far as it is certain which."""
        await self.open_batch.form()

    async def trained(self, step: int) -> None:
        """A durable checkpoint covers the batches below `step`."""
        async with self._reading:
            fresh = await groups.train(self.scope.sessions, self.scope.id, below=step, epoch=self.scope.keeper.epoch)
            for group in fresh:
                self.tally.move(group.ordinal, groups.COMMITTED, groups.TRAINED, group.tokens)

    def ranks(self) -> dict[int, int]:
        """Return the place of each live group among all that count (not dropped), in order of admission."""
        return self.tally.ranks(self.running())

    def totals(self) -> dict[str, int]:
        """Return the responses of the job by where they are, and tokens; see Tally.totals."""
        return self.tally.totals(self.scope.spec.sampling.num_generations, len(self.running()))

    async def drop_outstanding(self, reason: str) -> None:
        """The job is over: what is not trained by now will not be."""
        for group in list(self.scope.book.groups.values()):
            if group.ordinal not in self.tally:
                responses = list(self.scope.book.of(group))
                row = group_row(self.scope, group, responses, state=groups.DROPPED, reason=reason)
                await groups.record(self.scope.sessions, row, [], epoch=self.scope.keeper.epoch)
                self._record(group, groups.DROPPED)
        await self.open_batch.drop_all(reason)

    async def lost_worker(self) -> None:
        """A worker of this job died or left."""
        self.preemptions += 1
        await jobs.record_counters(
            self.scope.sessions, self.scope.id, {"preemptions": self.preemptions}, epoch=self.scope.keeper.epoch
        )


def _leave(ordinal: int, *, dropped: bool) -> ledger_pb2.Change:
    if dropped:
        return ledger_pb2.Change(drop=ledger_pb2.Drop(group=ordinal))
    return ledger_pb2.Change(retire=ledger_pb2.Retire(group=ordinal))
