"""Cutting and laying out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlharvest_trainer.batches import Sample
from rlharvest_trainer.microbatches import lay_out, plan

lengths = st.lists(st.tuples(st.integers(1, 20), st.integers(1, 40)), min_size=0, max_size=40)
relaxed = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


@relaxed
@given(lengths, st.integers(1, 128), st.randoms(use_true_random=False))
def test_a_plan_holds_each_sample_once_within_the_budget_in_any_order_of_arrival(
    make_sample: Callable[..., Sample], sizes: list[tuple[int, int]], budget: int, source: object
) -> None:
    samples = [make_sample(prompt, response, group=at // 4, handle=at) for at, (prompt, response) in enumerate(sizes)]
    batches = plan(samples, budget)
    assert sorted(sample.handle for batch in batches for sample in batch) == list(range(len(samples)))
    for batch in batches:
        assert len(batch) == 1 or len(batch) * max(sample.length for sample in batch) <= budget
    shuffled = list(samples)
    source.shuffle(shuffled)  # type: ignore[attr-defined]  # a random.Random of hypothesis
    again = plan(shuffled, budget)
    assert [[s.handle for s in batch] for batch in again] == [[s.handle for s in batch] for batch in batches]


def test_a_layout_points_each_response_token_at_the_logits_that_predict_it(
    make_sample: Callable[..., Sample],
) -> None:
    samples = [make_sample(3, 2, handle=1, advantage=0.5), make_sample(2, 5, handle=2, advantage=-1.0)]
    layout = lay_out(samples, torch.device("cpu"))
    assert layout.input_ids.shape == (2, 7)
    positions = layout.keep[layout.columns]
    assert positions.tolist() == [2, 3, 1, 2, 3, 4, 5]
    assert layout.rows.tolist() == [0, 0, 1, 1, 1, 1, 1]
    assert torch.equal(layout.input_ids[layout.rows, positions + 1], layout.targets)
    assert layout.advantages.tolist() == [0.5] * 2 + [-1.0] * 5
    assert layout.input_ids[0, 5:].tolist() == [0, 0]
