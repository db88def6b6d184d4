"""The table of a worker's throughput tells back what was measured."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.policies.throughput import Throughput


def law(batch: float, context: float) -> float:
    """A worker that reads weights for 8 ms, multiplies for 40 us a response, and reads a token of context in 40 ns."""
    return max(0.008, 4e-5 * batch) + 4e-8 * batch * context


def taught() -> Throughput:
    table = Throughput()
    for batch in (1, 2, 4, 8, 16, 32, 64, 100, 150, 200, 300, 400):
        for context in (500.0, 2000.0, 5000.0):
            table.observe(batch, context, law(batch, context))
    return table


def test_steps_are_told_back_also_for_contexts_that_were_never_seen() -> None:
    table = taught()
    for batch in (4, 32, 150, 300):
        for context in (1000.0, 3000.0):
            assert table.step_s(batch, context) == pytest.approx(law(batch, context), rel=0.15)


def test_the_plateau_falls_as_contexts_grow() -> None:
    table = taught()
    short, long = table.plateau(200.0), table.plateau(20_000.0)
    assert short is not None
    assert long is not None
    assert short > 100
    assert long < short


def test_there_is_no_plateau_before_three_sizes_were_seen() -> None:
    table = Throughput()
    assert table.plateau(100) is None
    assert table.step_s(10, 100) == 0
    for batch in (1, 10):
        table.observe(batch, 100, 0.01)
    assert not table.known
    table.observe(100, 100, 0.01)
    assert table.plateau(100) is not None


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.floats(0, 50_000), st.floats(1e-5, 5)), min_size=1, max_size=40))
def test_a_step_always_takes_time(measurements: list[tuple[int, float, float]]) -> None:
    table = Throughput()
    for batch, context, step_s in measurements:
        table.observe(batch, context, step_s)
    for batch in (1, 7, 300, 10_000):
        for context in (0.0, 1000.0, 40_000.0):
            value = table.step_s(batch, context)
            assert math.isfinite(value)
            assert value > 0
    plateau = table.plateau(1000.0)
    assert plateau is None or plateau <= 5001
