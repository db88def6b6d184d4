"""What nobody should send, at every entrance, while a job runs: it is refused by name, and loses, changes and stops nothing.

Short runs of `python -m benchmarks.fuzz`, always of the same seed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from rlharvest.testing.system import System

from benchmarks.fuzz import stage, still
from benchmarks.fuzz.bus import Bus
from benchmarks.fuzz.calls import Caller
from benchmarks.fuzz.rest import Rest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900), pytest.mark.filterwarnings("ignore")]

SEED = 20


class Scene:
    """A system, and a job in it that is over."""

    def __init__(self, system: System) -> None:
        self.system = system
        self.over = stage.finished(system)

    def unchanged(self, before: still.Still) -> None:
        assert still.differences(before, still.look(self.system, self.over)) == []
        assert still.problems(self.system) == []


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """One system for all of this module: none of it may harm the next test."""
    with System(tmp_path_factory.mktemp("system"), workers=1) as system:
        yield Scene(system)


def test_rest_answers_as_it_is_described(scene: Scene) -> None:
    before = still.look(scene.system, scene.over)
    fuzzer = Rest(scene.system, stage.target(scene.system, scene.over, scene.over), seed=SEED)
    fuzzer.run(n=2)
    assert fuzzer.outcome.faults == []
    assert set(fuzzer.by_operation) == {operation.label for operation in fuzzer.operations}
    scene.unchanged(before)


def test_every_grpc_method_refuses_what_it_cannot_take(scene: Scene) -> None:
    """Made-up, cut, oversized, of wrong jobs, claims and attempts: a status that helps, and the job ends exactly."""
    before = still.look(scene.system, scene.over)
    with stage.running(scene.system, scene.over, steps=1, step_s=0.1) as target:

        async def call(*, known: bool) -> Caller:
            async with Caller(scene.system, known=known) as caller:
                await caller.run(target, n=5, seed=SEED, oversized=known)
            return caller

        for known in (True, False):
            caller = asyncio.run(call(known=known))
            assert caller.outcome.faults == []
            assert caller.outcome.calls > 500
    scene.unchanged(before)


def test_no_message_on_any_subject_stops_or_changes_anything(scene: Scene) -> None:
    """Garbage, cut and doubled messages, orders of epochs that cannot be, another worker's tokens: the job ends exactly."""
    before = still.look(scene.system, scene.over)
    with stage.running(scene.system, scene.over, steps=1, step_s=0.1) as target:
        fuzzer = Bus(scene.system, target, seed=SEED)
        asyncio.run(fuzzer.run(n=3))
        assert fuzzer.published > 1000
    scene.unchanged(before)
