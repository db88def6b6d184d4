"""The intake of a run: one batch after the other goes from the coordinator into the learner.

Invariants: groups are taken at the positions that follow those taken, each once; in deterministic mode all of a batch
goes in at once, else each group as it comes; a group that cannot be trained on is left out, counted and reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from rlharvest.errors import CorruptData
from rlharvest.jobs.model import JobSpec
from rlharvest.v1 import batches_pb2

from rlharvest_trainer import metrics
from rlharvest_trainer.batches import BadGroup, Group, decode_group
from rlharvest_trainer.claim import Claim
from rlharvest_trainer.compute import Compute
from rlharvest_trainer.preparation import Prepared
from rlharvest_trainer.report import StepClock


class Intake:
    """Brings batches into one learner.

    Args:
        woken: set when a group of the job is complete.
        poll_s: how often to ask when no wake-up comes.
        idle: called whenever there is nothing to do but wait.
    """

    def __init__(
        self,
        claim: Claim,
        compute: Compute,
        spec: JobSpec,
        prepared: Prepared,
        *,
        woken: asyncio.Event,
        poll_s: float,
        idle: Callable[[], Awaitable[None]],
    ) -> None:
        self._claim = claim
        self._compute = compute
        self._spec = spec
        self._prepared = prepared
        self._woken = woken
        self._poll_s = poll_s
        self._idle = idle

    async def gather(self, clock: StepClock) -> None:
        """Bring the gradients of the claim's next batch into the learner.

        Raises:
            Stopped: an order came first.
            CorruptData: the coordinator answers with another batch, or other positions, than were asked for.
        """
        orders = self._claim.orders
        held: list[Group] = []
        after = 0
        while True:
            self._claim.show("waiting")
            since = time.monotonic()
            self._woken.clear()
            reply = await orders.obeying(self._claim.next_batch(after=after))
            complete = reply.complete or 0 < reply.size <= after + len(reply.groups)
            if not reply.groups and not complete:
                await self._idle()
                await orders.obeying(self._wait())
            clock.waited += time.monotonic() - since
            groups = await self._accept(reply, after)
            after += len(reply.groups)
            clock.tokens += sum(sample.length for group in groups for sample in group.samples)
            if self._spec.deterministic:
                held += groups
                groups = held if complete else []
            if groups:
                self._claim.show("computing")
                since = time.monotonic()
                await orders.obeying(self._compute(self._prepared.learner.accumulate, groups, stop=orders.given))
                clock.computed += time.monotonic() - since
            if complete:
                return

    async def _wait(self) -> None:
        try:
            async with asyncio.timeout(self._poll_s):
                await self._woken.wait()
        except TimeoutError:
            pass  # the poll

    async def _accept(self, reply: batches_pb2.NextBatchReply, after: int) -> list[Group]:
        """Return the groups of a reply that can be trained on; report the others."""
        step = self._claim.step
        places = [group.position for group in reply.groups]
        if reply.step != step or places != list(range(after, after + len(places))):
            raise CorruptData(f"NextBatch({step}, after {after}) brought batch {reply.step}, positions {places[:8]}")
        groups = []
        for message in reply.groups:
            try:
                group = await self._compute(
                    decode_group,
                    message,
                    vocab=self._prepared.vocab,
                    scale_rewards=self._spec.algorithm.scale_rewards == "group",
                    mask_truncated=self._spec.algorithm.mask_truncated_completions,
                )
            except BadGroup as bad:
                metrics.SKIPPED_GROUPS.inc()
                await self._claim.event(
                    "error",
                    "trainer.group_skipped",
                    f"left out of step {step}: {bad}",
                    {"step": step, "group": bad.group},
                )
                continue
            groups.append(group)
        return groups
