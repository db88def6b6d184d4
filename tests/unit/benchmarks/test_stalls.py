"""A stall is a silence after a fault, measured to its own end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.echo import stalls

times = st.lists(st.floats(0, 100, allow_subnormal=False), max_size=30, unique=True).map(sorted)


def test_the_longest_silence_of_each_fault_is_found() -> None:
    assert stalls([1.0, 5.0], [0.5, 1.5, 4.5, 5.25, 5.5], 6.0) == pytest.approx([3.0, 0.5])


def test_a_silence_that_outlasts_the_next_fault_counts_whole_for_both() -> None:
    assert stalls([1.0, 2.0], [0.9, 4.0], 4.0) == pytest.approx([3.0, 2.0])


def test_a_run_that_never_goes_on_is_silent_to_its_end() -> None:
    assert stalls([1.0], [0.5], 9.0) == pytest.approx([8.0])


@given(times, times)
def test_there_is_one_for_each_fault_and_none_is_negative(faults: list[float], tokens: list[float]) -> None:
    found = stalls(faults, tokens, 101.0)
    assert len(found) == len(faults)
    assert all(0 <= stall <= 101.0 for stall in found)
