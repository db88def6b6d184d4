"""The learning rate's promises."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest_trainer.schedule import learning_rate

shapes = st.sampled_from(["constant", "linear", "cosine"])


@given(st.integers(0, 300), st.integers(0, 50), st.integers(1, 200), shapes)
def test_it_stays_between_zero_and_the_peak(step: int, warmup: int, last: int, shape: str) -> None:
    rate = learning_rate(step, peak=0.1, shape=shape, warmup_steps=warmup, max_steps=last)  # type: ignore[arg-type]
    assert 0.0 <= rate <= 0.1


@given(st.integers(0, 50), st.integers(60, 200), shapes)
def test_it_rises_to_the_peak_and_then_never_rises_again(warmup: int, last: int, shape: str) -> None:
    rates = [
        learning_rate(step, peak=1.0, shape=shape, warmup_steps=warmup, max_steps=last)  # type: ignore[arg-type]
        for step in range(last)
    ]
    assert all(a < b for a, b in pairwise(rates[: warmup + 1]))
    assert rates[warmup] == pytest.approx(1.0)
    assert all(a >= b for a, b in pairwise(rates[warmup:]))
    assert rates[0] > 0


def test_cosine_and_linear_are_half_way_down_half_way_through() -> None:
    for shape in ("linear", "cosine"):
        rate = learning_rate(60, peak=2.0, shape=shape, warmup_steps=20, max_steps=100)  # type: ignore[arg-type]
        assert rate == pytest.approx(1.0)
