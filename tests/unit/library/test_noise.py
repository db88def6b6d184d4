"""Noise depends on seed and position alone."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.noise import response_seed, uniforms

SEEDS = st.integers(0, 2**64 - 1)


@given(SEEDS, st.integers(0, 1000), st.integers(0, 50), st.integers(0, 50))
def test_a_piece_is_the_same_whoever_computes_it(seed: int, start: int, n: int, cut: int) -> None:
    whole = uniforms(seed, start, n)
    cut = min(cut, n)
    assert np.array_equal(np.concatenate([uniforms(seed, start, cut), uniforms(seed, start + cut, n - cut)]), whole)
    assert ((whole >= 0) & (whole < 1)).all()


def test_uniforms_are_uniform_and_seeds_differ() -> None:
    drawn = uniforms(7, 0, 20_000)
    counts = np.histogram(drawn, bins=20, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 43.8  # chi-square, 19 degrees of freedom, p = 0.001
    assert not np.array_equal(drawn[:10], uniforms(8, 0, 10))


def test_values_are_pinned() -> None:
    """A new library release must not change a run that goes on under it."""
    assert uniforms(5, 3, 3).tolist() == [0.4433630921543533, 0.24899883245565346, 0.6775907098397027]


def test_every_part_of_the_seed_counts() -> None:
    seeds = {response_seed(*parts) for parts in [(0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)]}
    assert len(seeds) == 5
