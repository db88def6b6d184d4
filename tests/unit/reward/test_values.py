"""Return values of reward functions: one finite number a sample or None, everything else a named fault."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest_reward import values
from rlharvest_reward.fault import KINDS, RewardFault


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1.0),
        (0.5, 0.5),
        (True, 1.0),
        (np.float32(0.25), 0.25),
        (np.float64(-1), -1.0),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2.0), 2.0),
        (None, None),
    ],
)
def test_numbers_of_any_library_are_rewards(value: Any, expected: float | None) -> None:
    assert values.number(value, "f") == expected
    assert values.one_each([value], 1, "f") == [expected]
    assert values.verl_score({"score": value, "acc": 1}, "f") == expected


@pytest.mark.parametrize(
    ("value", "kind"),
    [
        (float("nan"), "not_finite"),
        (float("inf"), "not_finite"),
        (np.float32("-inf"), "not_finite"),
        (10**400, "not_finite"),
        ("0.5", "wrong_type"),
        (b"1", "wrong_type"),
        ([1.0], "wrong_type"),
        (1 + 2j, "wrong_type"),
        (np.array([1.0]), "wrong_type"),
        (np.array("1"), "wrong_type"),
        (object(), "wrong_type"),
    ],
)
def test_what_is_no_finite_number_is_a_fault(value: Any, kind: str) -> None:
    with pytest.raises(RewardFault, match=r"rewards\.py:f returned .*expected a finite number") as caught:
        values.number(value, "rewards.py:f")
    assert caught.value.kind == kind
    assert caught.value.function == "rewards.py:f"


@pytest.mark.parametrize(
    ("given_back", "kind", "says"),
    [
        ([1.0], "wrong_length", "returned 1 values .*expected 3"),
        ([1.0] * 4, "wrong_length", "returned 4 values .*expected 3"),
        ([], "wrong_length", "returned 0 values .*expected 3"),
        (1.0, "wrong_type", "expected a list of 3"),
        (None, "wrong_type", "expected a list of 3"),
        ("abc", "wrong_type", "expected a list of 3"),
        ({0: 1.0}, "wrong_type", "expected a list of 3"),
        (np.ones((3, 1)), "wrong_type", "expected a list of 3"),
        ([1.0, "0.5", 0.0], "wrong_type", "'0.5'"),
        ([1.0, float("nan"), 0.0], "not_finite", "nan"),
    ],
)
def test_a_list_is_never_broadcast_or_cut(given_back: Any, kind: str, says: str) -> None:
    with pytest.raises(RewardFault, match=says) as caught:
        values.one_each(given_back, 3, "f")
    assert caught.value.kind == kind


@pytest.mark.parametrize("given_back", [(1.0, None, 0.5), np.array([1.0, 0.0, 0.5])])
def test_tuples_and_flat_arrays_are_lists(given_back: Any) -> None:
    assert len(values.one_each(given_back, 3, "f")) == 3


def test_a_dict_without_score_names_its_keys() -> None:
    with pytest.raises(RewardFault, match="keys \\['reward'\\]; expected the key 'score'"):
        values.verl_score({"reward": 1.0}, "f")


@given(
    st.lists(st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3), max_size=5),
    st.integers(1, 4),
)
def test_rewards_are_finite_or_a_fault_of_a_known_kind(given_back: list[Any], n: int) -> None:
    kind = None
    rewards: list[float | None] = [None] * n
    try:
        rewards = values.one_each(given_back, n, "f")
    except RewardFault as fault:
        kind = fault.kind
    assert kind is None or kind in KINDS
    assert len(rewards) == n
    assert all(reward is None or np.isfinite(reward) for reward in rewards)
