"""Sums of components, samples out of requests, and how faults are shown."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.jobs.model import Reward
from rlharvest.v1 import scores_pb2
from rlharvest_reward import fault, scoring
from rlharvest_reward.fault import RewardFault


def rewards(*weights: float) -> list[Reward]:
    return [Reward(builtin="exact_match", weight=weight) for weight in weights]


def test_the_reward_is_the_weighted_sum_of_those_that_said_something() -> None:
    assert scoring.combine(rewards(1, 0.5, 3), [1.0, -2.0, None]) == 0.0
    assert scoring.combine(rewards(2, -1), [0.5, 0.25]) == 0.75


@pytest.mark.parametrize(
    ("weights", "scores", "kind"),
    [((1, 1), [None, None], "none"), ((1, 1), [1e308, 1e308], "not_finite"), ((1e6,), [1e305], "not_finite")],
)
def test_no_sum_is_made_up(weights: tuple[float, ...], scores: list[float | None], kind: str) -> None:
    with pytest.raises(RewardFault) as caught:
        scoring.combine(rewards(*weights), scores)
    assert caught.value.kind == kind


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.none() | st.floats(-1e6, 1e6)), min_size=1, max_size=6))
def test_a_sum_is_finite_or_a_fault(pairs: list[tuple[float, float | None]]) -> None:
    weights, scores = zip(*pairs, strict=True)
    if all(score is None for score in scores):
        with pytest.raises(RewardFault):
            scoring.combine(rewards(*weights), scores)
    else:
        assert math.isfinite(scoring.combine(rewards(*weights), scores))


@pytest.mark.parametrize(
    "changes",
    [
        {"columns_json": "{"},
        {"columns_json": "[1]"},
        {"columns_json": '{"x": NaN}'},
        {"columns_json": "[" * 100_000},
        {"prompt_json": "nope"},
        {"completion_ids": b"123"},
    ],
)
def test_a_request_that_cannot_be_read_is_a_fault(changes: dict[str, str | bytes]) -> None:
    with pytest.raises(RewardFault, match="the score request cannot be read"):
        scoring.sample_of(scores_pb2.ScoreRequest(job="j", **changes))  # type: ignore[arg-type]  # by name


def test_the_prompt_falls_back_to_what_the_model_saw() -> None:
    assert scoring.sample_of(scores_pb2.ScoreRequest(prompt_text="2 + 2 = "))["prompt"] == "2 + 2 = "


@given(st.text(alphabet=st.characters(), max_size=400), st.integers(40, 200))
def test_shortened_text_is_valid_and_short(text: str, most: int) -> None:
    short = fault.shorten(text + "\ud800", most)
    assert len(short) <= most
    short.encode()


def test_a_sample_is_shown_as_short_json() -> None:
    sample = scoring.sample_of(
        scores_pb2.ScoreRequest(
            completion="x" * 100_000,
            prompt_text="p" * 100_000,
            columns_json=json.dumps({f"column {n}": "y" * 1000 for n in range(50)}),
        )
    )
    shown = fault.sample_json(sample)
    assert len(shown) <= fault.MAX_SAMPLE
    assert "characters more" in shown
