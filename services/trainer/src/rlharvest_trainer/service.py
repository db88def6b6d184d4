"""The trainer process's life: claim a job, run it, claim the next.

Invariants: one run at a time; SIGTERM gives the run a release order and waits until it has saved and let go, within the
supervisor's grace; a claim in flight is given up at once.
"""

from __future__ import annotations

import asyncio

import structlog
from rlharvest.ids import new_id

from rlharvest_trainer import metrics
from rlharvest_trainer.orders import Order
from rlharvest_trainer.run import Run, Surroundings

log = structlog.get_logger(__name__)


class Service:
    """Claims and runs jobs until it is stopped."""

    def __init__(self, around: Surroundings) -> None:
        self._around = around
        self._instance = new_id("trn")
        self._run: Run | None = None
        self._stopping = asyncio.Event()
        self._stopped = asyncio.Event()

    async def run(self) -> None:
        """Work until `stop`."""
        try:
            while not self._stopping.is_set():
                await self._one()
        finally:
            self._stopped.set()

    async def stop(self) -> None:
        """Let the job in hand be released, and wait for it."""
        self._stopping.set()
        if self._run is not None:
            self._run.orders.give(Order.RELEASE)
        await self._stopped.wait()

    async def _one(self) -> None:
        metrics.phase("idle")
        settings = self._around.settings
        claim = asyncio.ensure_future(
            self._around.coordinator.claim(
                trainer=settings.trainer, instance=self._instance, wait_s=settings.claim_wait_s, devices=1
            )
        )
        stopping = asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait([claim, stopping], return_when=asyncio.FIRST_COMPLETED)
            if not claim.done():
                return
            claimed = claim.result()
        finally:
            claim.cancel()
            stopping.cancel()
            await asyncio.gather(claim, stopping, return_exceptions=True)
        if claimed is None:
            return
        metrics.CLAIMS.inc()
        log.info("job.claimed", job=claimed.job, fence=claimed.fence)
        self._run = Run(claimed, self._around)
        if self._stopping.is_set():
            self._run.orders.give(Order.RELEASE)
        try:
            await self._run.run()
        finally:
            self._run = None
