"""Which row a group gets: every row once a pass, the same for everyone."""

from __future__ import annotations

import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest_coordinator.data.order import Order

SEEDS = st.integers(0, 2**63 - 1)


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 200), seed=SEEDS, data_epoch=st.integers(0, 50), shuffle=st.booleans())
def test_a_pass_gives_every_row_once(rows: int, seed: int, data_epoch: int, shuffle: bool) -> None:
    order = Order(rows, seed=seed, shuffle=shuffle)
    found = [order.row(data_epoch * rows + place) for place in range(rows)]
    assert sorted(row for row, _ in found) == list(range(rows))
    assert {epoch for _, epoch in found} == {data_epoch}


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 100), seed=SEEDS, ordinals=st.lists(st.integers(0, 10_000), max_size=20))
def test_the_row_depends_on_nothing_but_the_ordinal(rows: int, seed: int, ordinals: list[int]) -> None:
    """Property: asked in any order, by another object, the answer is the same."""
    forward = [Order(rows, seed=seed, shuffle=True).row(ordinal) for ordinal in ordinals]
    backward = [Order(rows, seed=seed, shuffle=True).row(ordinal) for ordinal in reversed(ordinals)]
    assert forward == backward[::-1]


def test_without_shuffling_rows_come_as_they_stand() -> None:
    order = Order(3, seed=1, shuffle=False)
    assert [order.row(ordinal) for ordinal in range(5)] == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1)]


def test_passes_and_seeds_have_orders_of_their_own_that_never_change() -> None:
    def rows(seed: int, data_epoch: int) -> list[int]:
        return [Order(8, seed=seed, shuffle=True).row(data_epoch * 8 + place)[0] for place in range(8)]

    assert rows(0, 0) == [0, 2, 1, 5, 4, 3, 6, 7]  # of this very generator; another order would break resumed jobs
    assert len({tuple(rows(seed, data_epoch)) for seed in range(3) for data_epoch in range(3)}) == 9


def test_a_pass_over_a_million_rows_is_permuted_once() -> None:
    order = Order(1_000_000, seed=5, shuffle=True)
    order.row(0)
    started = time.perf_counter()
    for ordinal in range(10_000):
        order.row(ordinal)
    assert time.perf_counter() - started < 1.0


def test_no_rows_have_no_order() -> None:
    with pytest.raises(ValueError, match="without rows"):
        Order(0, seed=0, shuffle=True)
