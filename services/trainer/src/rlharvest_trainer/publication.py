"""Publications of a run: making a version of the parameters in memory, and the one that is on its way.

Invariants: at most one publication is on its way, so versions appear in the order of their steps; its failure is never
silent: whatever the run waits for ends with it (Orders.fail), `landed` raises it, and at the end of a run it is logged.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import structlog
from rlharvest import disk
from rlharvest.errors import Unavailable

from rlharvest_trainer import metrics, versions
from rlharvest_trainer.claim import Claim
from rlharvest_trainer.compute import Compute
from rlharvest_trainer.model import CausalLM
from rlharvest_trainer.orders import Orders
from rlharvest_trainer.preparation import Prepared
from rlharvest_trainer.room import Room
from rlharvest_trainer.versions import Publications, Version

log = structlog.get_logger(__name__)

_RETRY_S = 1.0


class Uploads:
    """Makes versions of one claim's parameters.

    Args:
        staging: directory that a version is written to before it is uploaded.
        tokenizer_digest: of what the job was tokenised with.
        reserve: bytes that must stay free on the disk of `staging`.
    """

    def __init__(
        self,
        publications: Publications,
        compute: Compute,
        claim: Claim,
        room: Room,
        *,
        tokenizer_digest: str,
        staging: Path,
        reserve: int,
    ) -> None:
        self._publications = publications
        self._compute = compute
        self._claim = claim
        self._room = room
        self._job = claim.job
        self._tokenizer_digest = tokenizer_digest
        self._staging = staging
        self._reserve = reserve

    async def newest(self) -> Version | None:
        """Return the job's last version, or None; waits for the weight service."""
        while True:
            try:
                return await self._publications.newest(self._job)
            except Unavailable as problem:
                log.warning("versions.waiting", job=self._job, why=str(problem))
                await asyncio.sleep(_RETRY_S)

    async def upload(self, prepared: Prepared, *, step: int, parent: int | None, shard_bytes: int) -> Version:
        """Write the parameters as they are now and make a version of them.

        Waits for the weight service, and for room on its disk and on the own one.

        Raises:
            DataError: the weight service refuses the files.
            Stopped: an order came while there was no room.
        """
        directory = self._staging / f"step_{step}"
        await self._room.wait(
            "TrainerDiskFull",
            lambda: self._compute(
                self._write, prepared.learner.model, directory, tokenizer=prepared.tokenizer, shard_bytes=shard_bytes
            ),
        )
        version = await self._room.wait("WeightsDiskFull", lambda: self._publish(directory, step=step, parent=parent))
        self._claim.next_version = max(self._claim.next_version, version.number + 1)
        metrics.PUBLICATIONS.inc()
        await asyncio.to_thread(shutil.rmtree, directory, ignore_errors=True)
        return version

    def _write(self, model: CausalLM, directory: Path, *, tokenizer: Path, shard_bytes: int) -> None:
        disk.require(directory, versions.model_bytes(model), reserve=self._reserve)
        versions.write(model, directory, tokenizer=tokenizer, shard_bytes=shard_bytes)

    async def _publish(self, directory: Path, *, step: int, parent: int | None) -> Version:
        while True:
            try:
                return await self._publications.publish(
                    directory,
                    job=self._job,
                    key=f"{self._claim.fence}:{step}",
                    step=step,
                    parent=parent,
                    tokenizer_digest=self._tokenizer_digest,
                    least=self._claim.next_version,
                )
            except Unavailable as problem:
                log.warning("publish.waiting", job=self._job, step=step, why=str(problem))
                await asyncio.sleep(_RETRY_S)

    async def clear(self) -> None:
        """Delete what was written."""
        await asyncio.to_thread(shutil.rmtree, self._staging, ignore_errors=True)


class InFlight:
    """The publication that is on its way, if there is one."""

    def __init__(self, orders: Orders) -> None:
        self._orders = orders
        self._task: asyncio.Task[None] | None = None

    def launch(self, work: Coroutine[Any, Any, None]) -> None:
        """Let a publication go on by itself; the one before has landed."""
        assert self._task is None, "publications go one after the other"
        self._task = asyncio.create_task(work, name="publication")
        self._task.add_done_callback(self._ended)

    async def landed(self) -> None:
        """Wait for the publication; raise its fault, or Stopped when an order comes first."""
        if self._task is not None:
            await self._orders.obeying(_joined(self._task))
            self._task = None

    async def abandon(self, patience_s: float) -> None:
        """Give the publication a little time, then cancel it; log its fault."""
        task, self._task = self._task, None
        if task is None:
            return
        await asyncio.wait([task], timeout=patience_s)
        task.cancel()
        (ended,) = await asyncio.gather(task, return_exceptions=True)
        if isinstance(ended, Exception):
            log.warning("publish.dropped", error=repr(ended))

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and isinstance(error := task.exception(), Exception):
            self._orders.fail(error)


async def _joined(task: asyncio.Task[None]) -> None:
    """Wait for a task without cancelling it when this wait is cancelled."""
    await asyncio.shield(task)
