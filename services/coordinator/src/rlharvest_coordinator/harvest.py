"""From finished responses to batches: rewards are asked for, complete groups go to SQL, and batches are formed there.

Invariants: a group is in SQL before the ledger forgets it; a batch is in SQL before the trainer hears of it; a group that
cannot be trained is dropped, counted and replaced, and says why; submitted = trained + dropped + outstanding.
"""

from __future__ import annotations

import asyncio
import bisect
from collections import Counter
from collections.abc import Sequence
from typing import Any

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import APIError
from rlharvest.bus import GROUPS, MAX_PAYLOAD_BYTES, SCORES, subject
from rlharvest.ids import response_id
from rlharvest.ledger.book import Book
from rlharvest.ledger.response import Group as LiveGroup
from rlharvest.ledger.response import Response, State
from rlharvest.policies import batching, blame
from rlharvest.policies.staleness import over_age, staleness
from rlharvest.spans import ids_bytes
from rlharvest.v1 import batches_pb2, ledger_pb2

from rlharvest_coordinator import scoring
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import groups, jobs
from rlharvest_coordinator.tables import Group, Sample

log = structlog.get_logger(__name__)

HEADROOM_BYTES = 4096
"""For subject and headers of a message."""


class Harvest:
    """What one job has brought in."""

    def __init__(self, scope: Scope, courier: Courier) -> None:
        self.scope = scope
        self.courier = courier
        self.questions = scoring.Questions(scope.spec)
        self.alive: list[int] = []
        """Ordinals of all groups in SQL that are not dropped, sorted."""
        self.left: dict[int, str] = {}
        """Every group in SQL: ordinal -> state."""
        self.batched = asyncio.Event()
        """Set, and replaced, whenever a group was committed to a batch."""
        self.reward_errors = 0
        self.preemptions = 0
        """Workers of this job that died or left."""
        self.failure = ""
        """Why the job cannot go on."""
        self._accepted: dict[int, Group] = {}
        """Complete groups in no batch yet, in order of completion."""
        self._too_large: dict[int, int] = {}
        """handle -> bytes of a question for its reward that no message can hold."""
        self._trained_tokens = 0
        self._committed: Counter[int] = Counter()
        """Batch -> groups committed to it."""

    async def start(self) -> None:
        """Take over what SQL knows of the job; after a fault of SQL, once more."""
        self.left.clear()
        self.alive.clear()
        self._accepted.clear()
        self._committed.clear()
        self._trained_tokens = 0
        for group in await groups.all_of(self.scope.sessions, self.scope.id):
            self.left[group.ordinal] = group.state
            if group.state != groups.DROPPED:
                self.alive.append(group.ordinal)
            if group.state == groups.ACCEPTED:
                self._accepted[group.ordinal] = group
            if group.step is not None and group.state != groups.DROPPED:
                self._committed[group.step] += 1
            if group.state == groups.TRAINED:
                self._trained_tokens += group.tokens
        self.reward_errors = int(self.scope.row.counters.get("reward_errors", 0))
        self.preemptions = int(self.scope.row.counters.get("preemptions", 0))

    def ranks(self) -> dict[int, int]:
        """Return the place of each live group among all that count (not dropped), in order of admission."""
        live = sorted(ordinal for ordinal in self.scope.book.groups if ordinal not in self.left)
        return {ordinal: bisect.bisect_left(self.alive, ordinal) + index for index, ordinal in enumerate(live)}

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
            if group.ordinal in self.left:
                # In SQL already, by a coordinator that did not live to say so.
                changes.append(_leave(group.ordinal, self.left[group.ordinal]))
                continue
            if self.scope.book is not book:
                return []  # a recovery replaced it: the next round looks at the new one
            responses = list(book.of(group))
            problem = self._problem(responses)
            if problem is not None:
                await self._drop_live(group, responses, *problem)
                changes.append(_leave(group.ordinal, groups.DROPPED))
            elif all(response.state is State.SCORED for response in responses):
                await self._accept(group, responses)
                changes.append(_leave(group.ordinal, groups.ACCEPTED))
        return changes

    def _ripe(self, book: Book) -> list[LiveGroup]:
        """Return the live groups that may be ready to leave the ledger, in order."""
        scored: Counter[int] = Counter()
        found = book.groups.keys() & self.left.keys()
        for response in book.index.within(State.SCORED).values():
            scored[response.group] += 1
            if response.score is not None and response.score.HasField("error"):
                found.add(response.group)
        found |= {ordinal for ordinal, n in scored.items() if n == book.groups[ordinal].n}
        found |= {response.group for response in book.index.blamed.values()}
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
            if (size := self._too_large.pop(response.handle, 0)) > 0:
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
        row = self._row_of(group, responses, state=groups.DROPPED, reason=reason)
        for response in responses:
            self.courier.forget(response.handle)
            self.questions.asked.pop(response.handle, None)
        if not await groups.record(self.scope.sessions, row, [], epoch=self.scope.keeper.epoch):
            return
        self.left[group.ordinal] = groups.DROPPED
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

    def _row_of(
        self, group: LiveGroup, responses: Sequence[Response], *, state: str, reason: str | None = None
    ) -> Group:
        rewards = [response.score.reward for response in responses if response.score is not None]
        scored = state == groups.ACCEPTED
        mean = sum(rewards) / len(rewards) if scored else None
        versions = {run.version for response in responses for run in response.runs}
        return Group(
            job=self.scope.id,
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
            # Oldest by optimizer step: after a trainer's resume a newer version may stand for an earlier step.
            oldest_version=min(
                versions, key=lambda version: (self.scope.versions.get(version, 0), version), default=None
            ),
            newest_version=max(versions, default=None),
            masked=False,
            at=self.scope.clock.time(),
        )

    async def _accept(self, group: LiveGroup, responses: Sequence[Response]) -> None:
        row = self._row_of(group, responses, state=groups.ACCEPTED)
        samples = [self.sample(group, response) for response in responses]
        await groups.record(self.scope.sessions, row, samples, epoch=self.scope.keeper.epoch)
        self.left[group.ordinal] = groups.ACCEPTED
        bisect.insort(self.alive, group.ordinal)
        self._accepted[group.ordinal] = row
        for response in responses:
            self.courier.forget(response.handle)
            self.questions.asked.pop(response.handle, None)

    def sample(self, group: LiveGroup, response: Response) -> Sample:
        """Return a response as SQL keeps it."""
        pieces, at = [], 0
        for piece in response.pieces:
            pieces.append([at, piece.n, str(piece.attempt), piece.worker])
            at += piece.n
        score = response.score
        return Sample(
            job=self.scope.id,
            handle=response.handle,
            response_id=response_id(self.scope.id, response.handle),
            group=group.ordinal,
            finish=response.finish.name.lower(),
            ids=ids_bytes(response.ids),
            logprobs=response.logprobs.astype("<f4").tobytes(),
            runs=[[run.n, run.version] for run in response.runs],
            pieces=pieces,
            prompt_text=self.scope.prepared.dataset.prompt_text(group.prompt).replace(
                "\0", "\N{REPLACEMENT CHARACTER}"
            ),
            text=self.scope.prepared.tokenizer.decode(response.ids.tolist()).replace("\0", "\N{REPLACEMENT CHARACTER}"),
            reward=score.reward if score is not None else 0.0,
            components=[
                [item.name, item.value if item.HasField("value") else None, item.weight]
                for item in (score.components if score is not None else ())
            ],
            at=self.scope.clock.time(),
        )

    async def form_batches(self) -> None:
        size = self.scope.spec.algorithm.prompts_per_step
        step = self._open_batch(size)
        while self._accepted:
            chosen = batching.commit(
                running=[ordinal for ordinal in self.scope.book.groups if ordinal not in self.left],
                accepted=list(self._accepted),
                committed=self._committed[step],
                size=size,
                order=self.scope.spec.staleness.order,
            )
            if not chosen:
                return
            stale = [
                ordinal for ordinal in chosen if self._age(ordinal, step) > self.scope.spec.staleness.max_staleness
            ]
            if stale and self.scope.spec.staleness.on_stale == "drop":
                await self._drop_stale(stale, step)
                continue
            await self._commit(chosen, step)
            step = self._open_batch(size)

    def _open_batch(self, size: int) -> int:
        step = max(self._committed, default=0)
        return step + 1 if self._committed[step] >= size else step

    def _age(self, ordinal: int, step: int) -> int:
        version = self._accepted[ordinal].oldest_version
        return staleness(batch=step, oldest_step=self.scope.versions.get(version, 0) if version is not None else step)

    async def _drop_stale(self, ordinals: Sequence[int], step: int) -> None:
        await groups.drop(self.scope.sessions, self.scope.id, ordinals, "stale", epoch=self.scope.keeper.epoch)
        for ordinal in ordinals:
            row = self._accepted.pop(ordinal)
            self.alive.remove(ordinal)
            self.left[ordinal] = groups.DROPPED
            self.scope.event(
                "warn",
                "group.stale",
                f"Group {ordinal} with {row.tokens} tokens is dropped: too old for batch {step}.",
                {"group": ordinal, "step": step, "tokens": row.tokens, "oldest_version": row.oldest_version},
            )

    async def _commit(self, ordinals: Sequence[int], step: int) -> None:
        bound = self.scope.spec.staleness.max_staleness
        first = self._committed[step]
        commitments = [
            groups.Commitment(
                ordinal=ordinal,
                step=step,
                position=first + index,
                staleness=self._age(ordinal, step),
                masked=over_age(self._age(ordinal, step), max_staleness=bound)
                and self.scope.spec.staleness.on_stale == "mask",
            )
            for index, ordinal in enumerate(ordinals)
        ]
        await groups.commit(self.scope.sessions, self.scope.id, commitments, epoch=self.scope.keeper.epoch)
        self._committed[step] += len(ordinals)
        for item in commitments:
            row = self._accepted.pop(item.ordinal)
            self.left[item.ordinal] = groups.COMMITTED
            pointer = batches_pb2.GroupComplete(
                job=self.scope.id,
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
        self.announce()

    async def _wake_trainer(self, pointer: batches_pb2.GroupComplete) -> None:
        try:
            await self.scope.js.publish(
                subject("groups", self.scope.id),
                pointer.SerializeToString(),
                headers={"Nats-Msg-Id": f"{self.scope.id}:{pointer.group}"},
                stream=GROUPS,
            )
        except (TimeoutError, NatsError, APIError) as error:
            log.warning("groups.publish_failed", job=self.scope.id, error=repr(error))

    def committed(self, step: int) -> int:
        """Return how many groups of a batch are committed."""
        return self._committed[step]

    async def trained(self, step: int) -> None:
        """A durable checkpoint covers the batches below `step`."""
        for group in await groups.train(self.scope.sessions, self.scope.id, below=step, epoch=self.scope.keeper.epoch):
            self.left[group.ordinal] = group.state
            self._trained_tokens += group.tokens

    def totals(self) -> dict[str, int]:
        """Return the responses of the job by where they are, submitted = trained + dropped + outstanding, and tokens."""
        n = self.scope.spec.sampling.num_generations
        by_state = Counter(self.left.values())
        live = sum(group.n for group in self.scope.book.groups.values() if group.ordinal not in self.left)
        submitted = n * len(self.left) + live
        trained, dropped = n * by_state[groups.TRAINED], n * by_state[groups.DROPPED]
        return {
            "submitted": submitted,
            "trained": trained,
            "dropped": dropped,
            "outstanding": submitted - trained - dropped,
            "trained_tokens": self._trained_tokens,
        }

    async def drop_outstanding(self, reason: str) -> None:
        """The job is over: what is in no batch will not be trained."""
        for group in list(self.scope.book.groups.values()):
            if group.ordinal not in self.left:
                row = self._row_of(group, list(self.scope.book.of(group)), state=groups.DROPPED, reason=reason)
                await groups.record(self.scope.sessions, row, [], epoch=self.scope.keeper.epoch)
                self.left[group.ordinal] = groups.DROPPED
        await groups.drop(
            self.scope.sessions, self.scope.id, list(self._accepted), reason, epoch=self.scope.keeper.epoch
        )
        for ordinal in self._accepted:
            self.left[ordinal] = groups.DROPPED
        self._accepted.clear()
        self.announce()

    async def lost_worker(self) -> None:
        """A worker of this job died or left."""
        self.preemptions += 1
        await jobs.record_counters(
            self.scope.sessions, self.scope.id, {"preemptions": self.preemptions}, epoch=self.scope.keeper.epoch
        )

    def announce(self) -> None:
        """Wake who waits for groups of a batch."""
        batched, self.batched = self.batched, asyncio.Event()
        batched.set()


def _leave(ordinal: int, state: str) -> ledger_pb2.Change:
    if state == groups.DROPPED:
        return ledger_pb2.Change(drop=ledger_pb2.Drop(group=ordinal))
    return ledger_pb2.Change(retire=ledger_pb2.Retire(group=ordinal))
