"""The trend of a series: right where it is known, and honest about samples that depend on one another."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.trend import trend


def test_a_line_has_its_slope() -> None:
    found = trend([1, 2, 3, 4], [10, 12, 14, 16])
    assert (found.slope, found.low, found.high) == pytest.approx((2, 2, 2))


def test_a_constant_does_not_rise() -> None:
    found = trend(range(10), [5.0] * 10)
    assert (found.slope, found.low, found.high) == (0, 0, 0)


def test_the_interval_of_noise_includes_0_about_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    inside = sum((found := trend(range(200), random.normal(size=200))).low <= 0 <= found.high for _ in range(200))
    assert inside >= 0.88 * 200


def test_growth_all_the_way_is_certain_and_one_stair_among_noise_is_not() -> None:
    random = np.random.default_rng(2)
    noise = random.normal(scale=100, size=200).cumsum()  # as memory moves: each sample from the one before
    steady = [50.0 * (step // 10) for step in range(200)]
    assert trend(range(200), steady).low > 0
    found = trend(range(200), noise)
    independent = trend(range(200), random.permutation(noise))
    assert found.high - found.low > 2 * (independent.high - independent.low)


@pytest.mark.parametrize("at", [[], [1, 2], [1, 1, 1]])
def test_too_few_places_have_no_trend(at: list[int]) -> None:
    with pytest.raises(ValueError, match="have no trend"):
        trend(at, at)
