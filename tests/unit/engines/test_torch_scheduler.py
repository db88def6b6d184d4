"""The scheduler: who runs, in which slot, and what a version switch and an abort do to it."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from rlharvest.engine import Request, Sampling
from rlharvest.noise import uniforms
from rlharvest_rollout.engines.torch.scheduler import Move, Scheduler, Sequence

SLOTS = 3


def sequence(handle: int, attempt: int = 1, *, prefix: int = 0) -> Sequence:
    return Sequence.of(
        Request(
            handle=handle,
            attempt=attempt,
            group=0,
            seed=handle,
            prompt=np.array([7, 8], dtype=np.uint32),
            prefix=np.arange(prefix, dtype=np.uint32),
            budget=500,
            sampling=Sampling(),
        )
    )


class SchedulerMachine(RuleBasedStateMachine):
    """Drives a scheduler beside a model that follows each sequence through its slots."""

    def __init__(self) -> None:
        super().__init__()
        self.scheduler = Scheduler(SLOTS)
        self.cached: dict[int, tuple[int, int]] = {}
        """What a cache that obeys the moves holds in each slot."""
        self.alive: dict[int, int] = {}

    def obey(self, moves: list[Move]) -> None:
        for move in moves:
            self.cached[move.target] = self.cached[move.source]

    @rule(handle=st.integers(0, 9), attempt=st.integers(1, 3))
    def submit(self, handle: int, attempt: int) -> None:
        self.obey(self.scheduler.submit(sequence(handle, attempt)))
        self.alive[handle] = max(attempt, self.alive.get(handle, 0))

    @rule()
    def admit(self) -> None:
        before = list(self.scheduler.waiting)
        entering = self.scheduler.entering
        admitted = self.scheduler.admit()
        if admitted is not None:
            assert entering is None
            assert admitted is before[0]

    @rule()
    def join(self) -> None:
        if self.scheduler.entering is not None:
            key = self.scheduler.entering.key
            self.cached[self.scheduler.join()] = key

    @rule(slots=st.sets(st.integers(0, SLOTS - 1)))
    def finish(self, slots: set[int]) -> None:
        ended = {running.key for slot, running in enumerate(self.scheduler.running) if slot in slots}
        self.obey(self.scheduler.finish(lambda running: running.key in ended))
        for handle, _ in ended:
            del self.alive[handle]

    @rule(handles=st.sets(st.integers(0, 9), max_size=4))
    def abort(self, handles: set[int]) -> None:
        keys = {(handle, self.alive[handle]) for handle in handles if handle in self.alive}
        self.obey(self.scheduler.abort(keys))
        for handle, _ in keys:
            del self.alive[handle]

    @rule()
    def requeue(self) -> None:
        order = [running.key for running in self.scheduler]
        self.scheduler.requeue()
        assert [waiting.key for waiting in self.scheduler.waiting] == order

    @invariant()
    def every_slot_holds_its_sequence_and_none_is_lost(self) -> None:
        running = self.scheduler.running
        assert len(running) <= SLOTS
        assert [self.cached[slot] for slot in range(len(running))] == [one.key for one in running]
        assert sorted(one.key for one in self.scheduler) == sorted(self.alive.items())
        assert self.scheduler.busy == bool(self.alive)


TestScheduler = pytest.mark.filterwarnings("default")(SchedulerMachine.TestCase)
TestScheduler.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


def test_the_uniform_of_a_token_depends_on_its_position_alone() -> None:
    """Also past the end of a drawn batch, and wherever the sequence starts."""
    for prefix in (0, 1, 63, 64, 65, 130):
        started = sequence(5, prefix=prefix)
        for position in range(prefix, 200):
            ahead = position % 7 + 1
            assert started.noise(ahead) == started.noise(ahead) == uniforms(5, position, ahead).tolist()
            started.ids.append(0)


def test_an_older_attempt_changes_nothing() -> None:
    scheduler = Scheduler(SLOTS)
    scheduler.submit(sequence(1, attempt=2))
    scheduler.submit(sequence(1, attempt=1))
    assert [one.key for one in scheduler] == [(1, 2)]
