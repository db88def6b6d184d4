"""The learning rule against a plain float64 computation, term by term."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlharvest_trainer.losses import (
    DUAL_CLIP,
    STD_EPSILON,
    Objective,
    clipped_loss,
    group_advantages,
    kl_k3,
    token_logprobs,
)

rewards = st.lists(st.floats(-1e3, 1e3), min_size=2, max_size=16)


def reference_advantages(values: list[float], scale: bool) -> list[float]:
    mean = math.fsum(values) / len(values)
    if not scale:
        return [value - mean for value in values]
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return [(value - mean) / (math.sqrt(variance) + STD_EPSILON) for value in values]


def reference_loss(
    policy: list[float], old: list[float], advantages: list[float], reference: list[float] | None, rule: Objective
) -> float:
    total = 0.0
    for t, (new, behaviour, advantage) in enumerate(zip(policy, old, advantages, strict=True)):
        ratio = math.exp(new - behaviour)
        clipped = min(max(ratio, 1 - rule.epsilon), 1 + rule.epsilon_high)
        gain = min(ratio * advantage, clipped * advantage)
        if advantage < 0:
            gain = max(gain, DUAL_CLIP * advantage)
        total -= gain
        if reference is not None:
            difference = reference[t] - new
            total += rule.beta * (math.exp(difference) - difference - 1)
    return total


@given(rewards, st.booleans())
def test_advantages_are_the_centred_rewards_over_their_deviation(values: list[float], scale: bool) -> None:
    found = group_advantages(torch.tensor(values, dtype=torch.float64), scale=scale)
    if len(set(values)) == 1:
        assert found.tolist() == [0.0] * len(values)
    else:
        assert found.tolist() == pytest.approx(reference_advantages(values, scale), rel=1e-9, abs=1e-9)


@given(rewards, st.floats(-100, 100))
def test_advantages_sum_to_zero_and_do_not_see_a_shift_of_all_rewards(values: list[float], shift: float) -> None:
    found = group_advantages(torch.tensor(values, dtype=torch.float64), scale=False)
    assert float(found.sum()) == pytest.approx(0.0, abs=1e-7)
    moved = group_advantages(torch.tensor(values, dtype=torch.float64) + shift, scale=False)
    assert moved.tolist() == pytest.approx(found.tolist(), abs=1e-7)


def test_a_group_of_one_is_reinforced_by_its_reward() -> None:
    assert group_advantages(torch.tensor([0.7]), scale=False).tolist() == pytest.approx([0.7])


terms = st.lists(
    st.tuples(st.floats(-8, -0.01), st.floats(-8, -0.01), st.floats(-3, 3), st.floats(-8, -0.01)),
    min_size=1,
    max_size=12,
)


@given(terms, st.sampled_from([0.0, 0.04, 1.0]))
def test_the_loss_is_the_clipped_objective_minus_the_kl_term(
    rows: list[tuple[float, float, float, float]], beta: float
) -> None:
    policy, old, advantages, reference = (list(column) for column in zip(*rows, strict=True))
    rule = Objective(epsilon=0.2, epsilon_high=0.28, beta=beta)
    found = clipped_loss(
        torch.tensor(policy, dtype=torch.float64),
        torch.tensor(old, dtype=torch.float64),
        torch.tensor(advantages, dtype=torch.float64),
        rule,
        torch.tensor(reference, dtype=torch.float64) if beta else None,
    )
    expected = reference_loss(policy, old, advantages, reference if beta else None, rule)
    assert float(found.loss) == pytest.approx(expected, rel=1e-9, abs=1e-9)


def test_a_clipped_token_has_no_gradient_and_an_unclipped_one_has_minus_ratio_times_advantage() -> None:
    policy = torch.tensor([-1.0, -1.0, -1.0, -1.0], dtype=torch.float64, requires_grad=True)
    old = torch.tensor([-1.0, -2.0, -0.5, -2.0], dtype=torch.float64)
    advantages = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    terms = clipped_loss(policy, old, advantages, Objective(epsilon=0.2, epsilon_high=0.2, beta=0.0))
    terms.loss.backward()
    assert policy.grad is not None
    assert policy.grad.tolist() == pytest.approx([-1.0, 0.0, 0.0, math.exp(1.0)])
    assert terms.high.tolist() == [False, True, False, False]
    assert terms.low.tolist() == [False, False, True, False]


def test_a_wild_sample_gives_a_bounded_loss() -> None:
    policy = torch.tensor([-0.1], requires_grad=True)
    rule = Objective(epsilon=0.2, epsilon_high=0.2, beta=0.1)
    terms = clipped_loss(policy, torch.tensor([-900.0]), torch.tensor([-1.0]), rule, torch.tensor([-500.0]))
    loss = float(terms.loss.detach())
    assert math.isfinite(loss)
    assert loss <= DUAL_CLIP + 0.1 * 25


@given(st.floats(-20, 0), st.floats(-20, 0))
def test_k3_is_never_negative_and_zero_for_equal_policies(policy: float, reference: float) -> None:
    value = float(kl_k3(torch.tensor(policy, dtype=torch.float64), torch.tensor(reference, dtype=torch.float64)))
    assert value >= -1e-12
    if policy == reference:
        assert value == 0.0


def test_k3_is_an_unbiased_estimate_of_the_divergence() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).double(), torch.tensor([0.2, 0.2, 0.6]).double()
    expected = float((p * (p / q).log()).sum())
    assert float((p * kl_k3(p.log(), q.log())).sum()) == pytest.approx(expected)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.3])
def test_logprobs_are_those_of_the_tempered_distribution(temperature: float) -> None:
    torch.manual_seed(0)
    logits = torch.randn(5, 11, dtype=torch.float64) * 3
    ids = torch.tensor([0, 10, 3, 3, 7])
    found, entropy = token_logprobs(logits, ids, temperature=temperature)
    distribution = torch.softmax(logits / temperature, -1)
    assert torch.allclose(found, distribution.log().gather(-1, ids[:, None])[:, 0])
    assert torch.allclose(entropy, -(distribution * distribution.log()).sum(-1))


def test_ids_that_are_never_sampled_have_no_share_of_the_distribution() -> None:
    logits = torch.randn(4, 10)
    ids = torch.tensor([0, 1, 2, 3])
    masked, entropy = token_logprobs(logits, ids, temperature=1.0, vocab=7)
    cut, expected = token_logprobs(logits[:, :7], ids, temperature=1.0)
    assert torch.equal(masked, cut)
    assert torch.equal(entropy, expected)
