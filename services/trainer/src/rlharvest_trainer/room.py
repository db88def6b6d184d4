"""Waiting for room on a disk: a named state instead of a failure.

A full disk destroys nothing that is there and is made larger by people, so a run that meets one says what it waits for,
tries again, and goes on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal, TypeVar

import structlog
from rlharvest.errors import DiskFull

from rlharvest_trainer.claim import Claim

log = structlog.get_logger(__name__)

Result = TypeVar("Result")

Reason = Literal["WeightsDiskFull", "CheckpointDiskFull", "TrainerDiskFull"]
"""Whose disk: the weight service's, that of the checkpoints, that of the trainer's own files."""

RETRY_S = 1.0


class Room:
    """Does what needs room on a disk, as soon as there is some.

    Args:
        retry_s: pause between two tries.
    """

    def __init__(self, claim: Claim, *, retry_s: float = RETRY_S) -> None:
        self._claim = claim
        self._retry_s = retry_s

    async def wait(self, reason: Reason, work: Callable[[], Awaitable[Result]]) -> Result:
        """Return the result of `work`, which is called again for as long as it raises DiskFull.

        Raises:
            Stopped: an order came while there was no room.
        """
        waited = False
        while True:
            try:
                result = await work()
                break
            except DiskFull as full:
                await self._claim.held_up(reason, str(full))
                waited = True
            await self._claim.orders.obeying(asyncio.sleep(self._retry_s))
        if waited:
            await self._claim.freed(reason)
        return result
