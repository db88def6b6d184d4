"""The batch that is being filled: which complete groups go into it, and when.

Invariants: a batch is in SQL before the trainer hears of it; batches are filled one after the other, and none beyond its
size; a group that is too old for its batch is dropped, masked or kept as the job says. Which groups are due is decided by
rlharvest.policies.batching.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Iterable, Sequence

import structlog
from nats.errors import Error as NatsError
from nats.js.errors import APIError
from rlharvest.bus import GROUPS, subject
from rlharvest.policies import batching
from rlharvest.policies.staleness import over_age, staleness
from rlharvest.v1 import batches_pb2

from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import groups
from rlharvest_coordinator.tables import Group
from rlharvest_coordinator.tally import Tally

log = structlog.get_logger(__name__)


class OpenBatch:
    """The complete groups of one job that are in no batch yet, and the batch that they go into.

    Args:
        running: tells the groups that may still be accepted or dropped.
    """

    def __init__(self, scope: Scope, running: Callable[[], Collection[int]]) -> None:
        self.scope = scope
        self.running = running
        self.tally = Tally()
        self.batched = asyncio.Event()
        """Set, and replaced, whenever a group was committed to a batch."""
        self._accepted: dict[int, Group] = {}
        """In order of completion."""
        self._step = 0
        """Optimizer steps before the one that the batch is for."""
        self._filled = 0
        """Groups committed to it."""

    def load(self, tally: Tally, accepted: Iterable[Group], *, step: int, filled: int) -> None:
        """Take over what SQL says."""
        self.tally = tally
        self._accepted = {group.ordinal: group for group in accepted}
        self._step, self._filled = step, filled

    def accept(self, row: Group) -> None:
        """A group is complete and in SQL."""
        self._accepted[row.ordinal] = row

    async def form(self) -> None:
        """Commit what is due."""
        size = self.scope.spec.algorithm.prompts_per_step
        while self._accepted:
            if self._filled >= size:
                self._step, self._filled = self._step + 1, 0
            chosen = batching.commit(
                running=self.running(),
                accepted=list(self._accepted),
                committed=self._filled,
                size=size,
                order=self.scope.spec.staleness.order,
            )
            if not chosen:
                return
            stale = [ordinal for ordinal in chosen if self._age(ordinal) > self.scope.spec.staleness.max_staleness]
            if stale and self.scope.spec.staleness.on_stale == "drop":
                await self._drop_stale(stale)
                continue
            await self._commit(chosen)

    async def drop_all(self, reason: str) -> None:
        """The job is over: what no checkpoint covers, in a batch or not, will not be trained."""
        rest = await groups.drop_rest(self.scope.sessions, self.scope.id, reason, epoch=self.scope.keeper.epoch)
        for ordinal, before in rest:
            self.tally.move(ordinal, before, groups.DROPPED)
        self._accepted.clear()
        self.announce()

    def announce(self) -> None:
        """Wake who waits for groups of a batch."""
        batched, self.batched = self.batched, asyncio.Event()
        batched.set()

    def _age(self, ordinal: int) -> int:
        version = self._accepted[ordinal].oldest_version
        oldest = self.scope.versions.get(version, 0) if version is not None else self._step
        return staleness(batch=self._step, oldest_step=oldest)

    async def _drop_stale(self, ordinals: Sequence[int]) -> None:
        await groups.drop(self.scope.sessions, self.scope.id, ordinals, "stale", epoch=self.scope.keeper.epoch)
        for ordinal in ordinals:
            row = self._accepted.pop(ordinal)
            self.tally.move(ordinal, groups.ACCEPTED, groups.DROPPED)
            self.scope.event(
                "warn",
                "group.stale",
                f"Group {ordinal} with {row.tokens} tokens is dropped: too old for batch {self._step}.",
                {"group": ordinal, "step": self._step, "tokens": row.tokens, "oldest_version": row.oldest_version},
            )

    async def _commit(self, ordinals: Sequence[int]) -> None:
        bound, mask = self.scope.spec.staleness.max_staleness, self.scope.spec.staleness.on_stale == "mask"
        ages = {ordinal: self._age(ordinal) for ordinal in ordinals}
        commitments = [
            groups.Commitment(
                ordinal=ordinal,
                step=self._step,
                position=self._filled + index,
                staleness=age,
                masked=over_age(age, max_staleness=bound) and mask,
            )
            for index, (ordinal, age) in enumerate(ages.items())
        ]
        await groups.commit(self.scope.sessions, self.scope.id, commitments, epoch=self.scope.keeper.epoch)
        self._filled += len(commitments)
        rows = [self._accepted.pop(ordinal) for ordinal in ordinals]
        for ordinal in ordinals:
            self.tally.move(ordinal, groups.ACCEPTED, groups.COMMITTED)
        for item, row in zip(commitments, rows, strict=True):
            # A wake-up: the trainer looks by itself, should it get lost.
            await self._wake_trainer(item, row)
        self.announce()

    async def _wake_trainer(self, item: groups.Commitment, row: Group) -> None:
        pointer = batches_pb2.GroupComplete(
            job=self.scope.id,
            step=item.step,
            group=item.ordinal,
            position=item.position,
            staleness=item.staleness,
            oldest_version=row.oldest_version or 0,
            newest_version=row.newest_version or 0,
            tokens=row.tokens,
            reward_mean=row.reward_mean or 0.0,
        )
        try:
            await self.scope.js.publish(
                subject("groups", self.scope.id),
                pointer.SerializeToString(),
                headers={"Nats-Msg-Id": f"{self.scope.id}:{pointer.group}"},
                stream=GROUPS,
            )
        except (TimeoutError, NatsError, APIError) as error:
            log.warning("groups.publish_failed", job=self.scope.id, error=repr(error))
