"""Curves out of block characters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.cli.charts import plot, resample, sparkline

VALUES = st.lists(st.none() | st.floats(allow_nan=True, allow_infinity=False, width=32), max_size=300)


def test_a_rising_curve_rises() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([1, None, 2]) == "▁ █"
    assert sparkline([]) == ""
    assert sparkline([None]) == ""
    assert plot([0, 1], width=2, height=2) == ["1 ┤ █", "0 ┤▁█"]
    assert plot([None]) == []


def test_many_values_are_averaged_into_the_width() -> None:
    assert resample([1, 3, 5, None], 2) == [2, 5]


@given(VALUES, st.integers(1, 80), st.integers(1, 10))
def test_any_values_fit_into_the_given_size(values: list[float | None], width: int, height: int) -> None:
    assert len(sparkline(values, width)) <= width
    lines = plot(values, width=width, height=height)
    assert len(lines) in (0, height)
    assert all(len(line.partition("┤")[2]) <= width for line in lines)
