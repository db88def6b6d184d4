"""What a run says to the coordinator about its claim, and what it is told.

Invariants: the claim is renewed from the event loop alone, so that it goes on while the computing thread is busy; whatever
the coordinator orders becomes an order of the run; a lost claim is an order too.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from pathlib import Path

import structlog
from rlharvest.errors import DataError, Fenced, NotFound, Unavailable
from rlharvest.v1 import batches_pb2

from rlharvest_trainer import metrics
from rlharvest_trainer.coordinator import Coordinator
from rlharvest_trainer.notices import Level, Notices
from rlharvest_trainer.orders import Order, Orders
from rlharvest_trainer.versions import Version

log = structlog.get_logger(__name__)

_SEVERITY = {"info": logging.INFO, "warn": logging.WARNING, "error": logging.ERROR}


class Claim:
    """One claim of one job.

    Attributes:
        step: optimizer steps done, as renewals tell it.
        phase: what the run does now, as renewals tell it.
        obstacle: what it waits for from outside, and the same for people; renewals tell it.
        lost_version: newest version, if the weight service lost it; the run publishes its step again.
        next_version: above the numbers of all versions that are known of the job.
    """

    def __init__(self, claimed: batches_pb2.Claimed, coordinator: Coordinator, notices: Notices) -> None:
        self.job = claimed.job
        self.fence = claimed.fence
        self.step = 0
        self.phase = "loading"
        self.obstacle: tuple[str, str] | None = None
        self.lost_version: int | None = None
        self.next_version = claimed.next_version
        self.orders = Orders()
        self._period = max(claimed.renew_s, 0.05)
        self._coordinator = coordinator
        self._notices = notices

    def show(self, phase: str) -> None:
        """Tell people what the run does now."""
        self.phase = phase
        metrics.phase(phase)

    async def held_up(self, reason: str, message: str) -> None:
        """Tell people that the run waits for something outside, once for each reason."""
        news = self.obstacle is None or self.obstacle[0] != reason
        self.obstacle = (reason, message)
        if news:
            await self.event("warn", "trainer.waiting", f"{reason}: {message}", {"reason": reason, "step": self.step})

    async def freed(self, reason: str) -> None:
        """Tell people that the run goes on after what `held_up` told."""
        if self.obstacle is not None and self.obstacle[0] == reason:
            self.obstacle = None
            await self.event("info", "trainer.goes_on", f"{reason} is over.", {"reason": reason, "step": self.step})

    async def renew(self) -> None:
        """Keep the claim until it is lost."""
        while True:
            await asyncio.sleep(self._period)
            try:
                reply = await self._coordinator.renew(
                    self.job,
                    self.fence,
                    step=self.step,
                    phase=self.phase,
                    obstacle=self.obstacle,
                    timeout_s=max(self._period, 1.0),
                )
            except Unavailable as problem:
                log.warning("renew.unheard", job=self.job, why=str(problem))
                continue
            except (Fenced, NotFound):
                self.orders.give(Order.FENCED)
                return
            self.lost_version = reply.lost_version if reply.HasField("lost_version") else None
            self._heed(reply.directive)

    async def next_batch(self, *, after: int) -> batches_pb2.NextBatchReply:
        """Return the groups of the next batch from position `after` on, as many as there are."""
        return await self._coordinator.next_batch(self.job, self.fence, step=self.step, after=after)

    async def report_step(self, step: int, version: Version, values: Mapping[str, float]) -> None:
        """Say that a step is published."""
        directive = await self._coordinator.report_step(
            self.job, self.fence, step=step, version=version.number, digest=version.digest, metrics=values
        )
        self._heed(directive)

    async def report_checkpoint(self, version: int, path: Path, digest: str, values: Mapping[str, float]) -> None:
        """Say that the checkpoint of the present step is durable."""
        await self._coordinator.report_checkpoint(
            self.job, self.fence, step=self.step, version=version, path=str(path), digest=digest, metrics=values
        )

    async def finish(
        self, outcome: batches_pb2.Outcome.ValueType, *, error: str = "", patience_s: float | None = None
    ) -> None:
        """Let go of the job. With `patience_s` a coordinator that doesn't answer for that long is left to its deadline."""
        try:
            await self._coordinator.finish(self.job, self.fence, outcome, error=error, patience_s=patience_s)
        except Unavailable as problem:
            log.warning("finish.unheard", job=self.job, why=str(problem))
        shown = batches_pb2.Outcome.Name(outcome).removeprefix("OUTCOME_").lower()
        log.info("run.finished", job=self.job, outcome=shown, step=self.step, **({"error": error} if error else {}))

    async def fail(self, error: str) -> None:
        """Say that the job cannot go on, to people and to the coordinator."""
        await self.event("error", "trainer.failed", error, {"step": self.step})
        try:
            await self.finish(batches_pb2.OUTCOME_FAILED, error=error)
        except (Fenced, NotFound, DataError) as problem:
            log.warning("finish.refused", job=self.job, why=str(problem))

    async def event(self, level: Level, kind: str, message: str, data: Mapping[str, object]) -> None:
        """Tell people what happened."""
        log.log(_SEVERITY[level], kind, job=self.job, message=message)
        await self._notices.event(self.job, level, kind, message, data)

    def _heed(self, directive: batches_pb2.Directive.ValueType) -> None:
        if directive == batches_pb2.DIRECTIVE_PAUSE:
            self.orders.give(Order.PAUSE)
        elif directive == batches_pb2.DIRECTIVE_CANCEL:
            self.orders.give(Order.CANCEL)
