"""The coordinator's side of the ingest benchmark: the real log, fold, store, purge and acknowledgements in one process.

What is left out is what a run does besides: SQL, dispatch, rewards.
"""

from __future__ import annotations

import asyncio
import sys
import time
from types import SimpleNamespace
from typing import Any, cast

from nats.aio.client import Client
from rlharvest import bus
from rlharvest.clock import SystemClock
from rlharvest.ledger.store import Store
from rlharvest.supervise import cancel
from rlharvest_coordinator.courier import Courier
from rlharvest_coordinator.history import History
from rlharvest_coordinator.keeper import Keeper
from rlharvest_coordinator.log import Log
from rlharvest_coordinator.scope import Scope

from benchmarks.ingest import control
from benchmarks.ingest.load import EPOCH, Load


class Receiver:
    """One keeper of the books."""

    def __init__(self, nats: Client, url: str) -> None:
        self.nats = nats
        self.url = url
        self.couriers: dict[str, Courier] = {}
        self.keeper = Keeper(Log(nats), Store.connect(url), EPOCH, self._no_epoch)
        self.messages = self.batches = 0
        self.keeper.listen(self._applied)

    async def _no_epoch(self) -> int:
        raise AssertionError("nothing was lost, so there is nothing to recover from")

    async def _applied(self, job: str, entries: Any) -> None:
        self.batches += 1
        self.messages += len(entries)
        await self.couriers[job].acknowledge_all(entries)

    async def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """Do what the benchmark asks."""
        load = Load(**request["load"]) if "load" in request else None
        match request["do"], load:
            case "open", Load():
                await self.open(load)
            case "check", Load():
                return await self.check(load)
            case "close", Load():
                await self.keeper.close_job(load.job)
        return {"cpu": time.process_time()}

    async def open(self, load: Load) -> None:
        """Open a job, admit all its groups and give them to their workers."""
        parts = SimpleNamespace(
            id=load.job, nats=self.nats, clock=SystemClock(), roster=SimpleNamespace(seats={}), keeper=self.keeper
        )
        scope = cast(Scope, parts)
        self.couriers = {load.job: Courier(scope, History(scope))}
        book = await self.keeper.open(load.job)
        assigned = 0
        for changes in load.transitions():
            await self.keeper.propose(load.job, changes)
            assigned += len(changes) - sum(change.HasField("admit") for change in changes)
            while book.counters["assigned"] < assigned:  # noqa: ASYNC110 - the book tells nobody
                await asyncio.sleep(0.005)
        self.messages = self.batches = 0

    async def check(self, load: Load) -> dict[str, Any]:
        """Compare the book, and the one that is rebuilt from the store, with what was published."""
        book = self.keeper.books[load.job]
        store = Store.connect(self.url)
        rebuilt, _ = await store.begin(load.job, EPOCH)
        await store.close()
        # Takes seconds; the connections are kept meanwhile.
        wrong, wrong_stored = await asyncio.to_thread(lambda: (load.wrong(book), load.wrong(rebuilt)))
        return {
            "wrong": wrong,
            "wrong_stored": wrong_stored,
            "counters": dict(book.counters),
            "counters_stored": dict(rebuilt.counters),
            "messages": self.messages,
            "batches": self.batches,
        }


async def main(nats_url: str, redis_url: str) -> None:
    """Serve the benchmark until it asks to stop."""
    nats = await bus.connect(nats_url, "receiver")
    receiver = Receiver(nats, redis_url)
    await receiver.keeper.start([])
    tasks = [asyncio.create_task(receiver.keeper.run()), asyncio.create_task(receiver.keeper.purge())]
    commands = await bus.connect(nats_url, "receiver/control")
    await control.serve(commands, "receiver", receiver.answer)
    await cancel(tasks)
    await receiver.keeper.log.close()
    await receiver.keeper.store.close()
    await commands.close()
    await nats.close()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2]))
