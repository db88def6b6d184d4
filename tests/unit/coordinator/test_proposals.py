"""A run proposes, waits until the keeper has read that, and goes on: whatever became of the transition."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

from rlharvest.jobs.state import Status
from rlharvest.v1 import ledger_pb2
from rlharvest_coordinator.run import Run
from rlharvest_coordinator.scope import Scope

CHANGE = ledger_pb2.Change(begin=ledger_pb2.Begin())


class Keeper:
    """A log that grows by a message a proposal, and is read when the test says so."""

    def __init__(self) -> None:
        self.applied_to = self.end = 0
        self.recoveries = 1
        self.caught_up = True
        self.recovers = False
        self.epoch = 1
        self.log = SimpleNamespace(obstacle=None)
        self.obstacle = None

    async def propose(self, job: str, changes: list[ledger_pb2.Change]) -> int:
        self.end += 1
        sequence = self.end
        if self.recovers:
            # The log is another one from now on, and shorter.
            self.recoveries, self.applied_to, self.end = self.recoveries + 1, 0, 0
        return sequence


class Eager:
    """A dispatcher that always wants something."""

    def going_on(self) -> None:
        pass

    def orphans(self) -> list[ledger_pb2.Change]:
        return [CHANGE]

    def conclude(self) -> list[ledger_pb2.Change]:
        return []

    admit = conclude

    def assign(self, leaving: set[int]) -> list[ledger_pb2.Change]:
        return []


class Serving:
    """Nobody asks for completions."""

    def recovered(self) -> None:
        pass

    def let_go(self) -> list[ledger_pb2.Change]:
        return []

    admit = let_go


class History:
    """Nothing to draft from."""

    async def follow(self) -> None:
        pass

    def recovered(self) -> None:
        pass


class Harvest:
    """A harvest without work."""

    failure = ""
    questions = SimpleNamespace(asked={})

    async def ask_for_scores(self) -> None:
        pass

    async def settle(self) -> list[ledger_pb2.Change]:
        return []

    async def form_batches(self) -> None:
        pass


def run_with(keeper: Keeper) -> Run:
    row = SimpleNamespace(status=Status.RUNNING.value, version=0)
    scope: Any = SimpleNamespace(
        id="rljob_x", keeper=keeper, row=row, status=Status.RUNNING, spec=None, woken=SimpleNamespace(set=lambda: None)
    )
    run = Run.__new__(Run)
    run.scope = cast(Scope, scope)
    run.harvest, run.dispatcher, run.serving = cast(Any, Harvest()), cast(Any, Eager()), cast(Any, Serving())
    run.history = cast(Any, History())
    run.closed = run.doubtful = False
    run._proposed = 0
    return run


async def test_nothing_is_proposed_before_the_last_proposal_was_read() -> None:
    keeper = Keeper()
    run = run_with(keeper)
    for _ in range(3):
        await run.tick()
    assert keeper.end == 1
    keeper.applied_to = 1
    await run.tick()
    assert keeper.end == 2


async def test_a_transition_that_never_took_effect_does_not_stall_the_run() -> None:
    """The keeper read past it and told nobody, as with one that another epoch fenced off."""
    keeper = Keeper()
    run = run_with(keeper)
    for expected in range(1, 6):
        await run.tick()
        assert keeper.end == expected
        keeper.applied_to = keeper.end + 3


async def test_a_recovery_forgets_what_was_on_its_way() -> None:
    """The sequences of a new stream begin anew: the old one must not be waited for."""
    keeper = Keeper()
    run = run_with(keeper)
    keeper.applied_to = keeper.end = 5000
    keeper.recovers = True
    await run.tick()
    keeper.recovers = False
    await run.tick()
    assert keeper.end == 1
    keeper.applied_to = 0
    run.recovered()
    await run.tick()
    assert keeper.end == 2
