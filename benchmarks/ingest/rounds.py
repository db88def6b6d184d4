"""What a round of a run costs that finds nothing to do: every response is live, with a worker, and makes progress.

The run is the coordinator's own, with a book, a roster and a clock, and nobody to send to. Each round includes the look for
responses that stand still, which a run takes once a second.
"""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, cast

from rlharvest.fleet import member as life
from rlharvest.fleet.member import WorkerState
from rlharvest.jobs.model import parse
from rlharvest.jobs.state import Status
from rlharvest.ledger.book import Book
from rlharvest.policies.staleness import Gate
from rlharvest.testing.clock import FakeClock
from rlharvest.v1 import fleet_pb2, ledger_pb2
from rlharvest_coordinator.roster import Seat
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.scope import Scope

from benchmarks.ingest.load import EPOCH, Load

_VERSION = 0


def run_of(load: Load) -> tuple[Run, FakeClock]:
    """Return a run whose responses all have their owners, and its clock."""
    book = Book(load.job)
    for number, changes in enumerate(load.transitions(), 1):
        book.transition(ledger_pb2.Transition(epoch=EPOCH, number=number, changes=changes))
    clock = FakeClock()
    seats = {seat.id: seat for seat in (_seat(load, index, book, clock) for index in range(load.workers))}
    spec = parse(
        {
            "model": "m",
            "dataset": {"path": "d.jsonl"},
            "rewards": [{"builtin": "exact_match"}],
            "algorithm": {"prompts_per_step": load.workers},
            "staleness": {"max_staleness": 0},
            "sampling": {"num_generations": load.live},
        }
    )

    class Alone(Scope):
        """A scope with nobody to reach."""

        def __init__(self) -> None:
            self.id, self.spec, self.clock = load.job, spec, clock
            self.row = cast(Any, SimpleNamespace(status=Status.RUNNING.value, step=0, version=_VERSION, counters={}))
            keeper = SimpleNamespace(
                books={load.job: book}, epoch=EPOCH, applied_to=0, caught_up=True, recoveries=1, propose=None
            )
            self.keeper = cast(Any, keeper)
            self.roster = cast(Any, SimpleNamespace(seats=seats))
            self.gate = Gate(load.workers, 0, spec.limits.max_steps)
            self.versions = {_VERSION: 0}

    return Run(Alone()), clock


def _seat(load: Load, index: int, book: Book, clock: FakeClock) -> Seat:
    name = load.worker(index)
    member = life.join(name, 1, now=clock.monotonic())
    member = life.beat(member, 1, WorkerState.READY, now=clock.monotonic())
    seat = Seat(
        member=member,
        hostname="simulated",
        pid=0,
        worker_class="preemptible",
        worker_type="cpu",
        engines=("stub",),
        slots=load.live,
        numerics_key="",
        batch_invariant=True,
        joined_at=0.0,
        heartbeat=fleet_pb2.Heartbeat(job=load.job, version=_VERSION),
    )
    seat.held = {handle: response.attempt for handle, response in book.index.owned_by(name, 1).items()}
    return seat


def round_ms(load: Load, n: int) -> list[float]:
    """Return how long each of `n` rounds takes, in milliseconds."""
    run, clock = run_of(load)
    return asyncio.run(_rounds(run, clock, n))


async def _rounds(run: Run, clock: FakeClock, n: int) -> list[float]:
    taken = []
    for _ in range(n):
        clock.advance(1.0)
        start = time.perf_counter()
        await run.tick()
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


def beat_ms(load: Load, n: int) -> list[float]:
    """Return how long taking in the heartbeats of all workers takes, `n` times, in milliseconds."""
    run, _ = run_of(load)
    taken = []
    for _ in range(n):
        start = time.perf_counter()
        for seat in run.scope.roster.seats.values():
            run.beat(seat)
        taken.append(1e3 * (time.perf_counter() - start))
    return taken
