"""The sampler inverts the cumulative distribution, in vocabulary order, of what the truncation left."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.engine import Sampling
from rlharvest.noise import uniforms
from rlharvest_rollout.engines.torch.sampler import NotFinite, sample, truncate

LOGITS = torch.tensor([0.5, -1.0, 2.0, 0.0, 1.0, -3.0, 1.5, 0.25])


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.6])
def test_frequencies_are_the_softmax_after_temperature(temperature: float) -> None:
    """Chi-square with 7 degrees of freedom: 24.3 is exceeded once in a thousand."""
    n = 20_000
    ids, logprobs = sample(
        LOGITS.repeat(n, 1), Sampling(temperature=temperature), uniforms(3, 0, n).tolist(), vocab=len(LOGITS)
    )
    wanted = (LOGITS.double() / temperature).softmax(-1)
    counts = np.bincount(ids, minlength=len(LOGITS))
    assert ((counts - n * wanted.numpy()) ** 2 / (n * wanted.numpy())).sum() < 24.3
    assert np.allclose(logprobs, wanted.log()[torch.tensor(ids)])


@given(
    st.lists(st.floats(-30, 30, width=32), min_size=2, max_size=40),
    st.floats(0, 1, exclude_max=True),
    st.floats(0.05, 5),
)
@settings(max_examples=200, deadline=None)
def test_the_token_is_the_first_whose_cumulative_weight_exceeds_the_uniform(
    scores: list[float], uniform: float, temperature: float
) -> None:
    ids, logprobs = sample(torch.tensor([scores]), Sampling(temperature=temperature), [uniform], vocab=len(scores))
    weights = (torch.tensor(scores).double() / temperature).softmax(-1).cumsum(0)
    assert weights[ids[0]] > uniform - 1e-12
    assert ids[0] == 0 or weights[ids[0] - 1] <= uniform + 1e-12
    assert logprobs[0] <= 1e-9


@given(st.integers(1, 20), st.floats(0, 1, exclude_max=True), st.integers(0, 2**32))
@settings(max_examples=100, deadline=None)
def test_a_masked_token_is_never_sampled(vocab: int, uniform: float, seed: int) -> None:
    """Neither padding of the head nor ids beyond the tokenizer, also for the largest uniform there is."""
    logits = torch.randn(1, 64, generator=torch.Generator().manual_seed(seed)) * 5
    for at in (uniform, 1 - 2.0**-53, 0.0):
        assert sample(logits, Sampling(vocab=vocab), [at], vocab=40)[0][0] < vocab
        assert sample(logits, Sampling(temperature=0.0, vocab=vocab), [at], vocab=40)[0][0] < vocab
        assert sample(logits, Sampling(), [at], vocab=40)[0][0] < 40


def test_a_token_of_weight_zero_is_never_sampled_at_the_ends() -> None:
    logits = torch.tensor([[-math.inf, 0.0, -math.inf, 0.0, -math.inf]])
    assert sample(logits, Sampling(), [0.0], vocab=5)[0] == [1]
    assert sample(logits, Sampling(), [0.5], vocab=5)[0] == [3]
    assert sample(logits, Sampling(), [1 - 2.0**-53], vocab=5)[0] == [3]


def test_temperature_0_takes_the_likeliest_with_its_log_probability_at_1() -> None:
    ids, logprobs = sample(LOGITS.repeat(2, 1), Sampling(temperature=0.0), [0.1, 0.9], vocab=len(LOGITS))
    assert ids == [2, 2]
    assert logprobs == pytest.approx([float(LOGITS.double().log_softmax(-1)[2])] * 2)


@pytest.mark.parametrize(
    ("sampling", "kept"),
    [
        (Sampling(top_k=3), {2, 6, 4}),
        (Sampling(top_k=100), set(range(8))),
        (Sampling(top_p=0.35), {2}),
        (Sampling(top_p=0.7), {2, 6, 4}),
        (Sampling(min_p=0.3), {2, 4, 6}),
        (Sampling(top_k=3, top_p=0.6), {2, 6}),
    ],
)
def test_truncation_keeps_the_named_tokens(sampling: Sampling, kept: set[int]) -> None:
    left = truncate(LOGITS.double().unsqueeze(0), sampling)
    assert set(torch.isfinite(left[0]).nonzero()[:, 0].tolist()) == kept


def test_the_log_probability_is_of_the_truncated_distribution() -> None:
    ids, logprobs = sample(LOGITS.unsqueeze(0), Sampling(top_k=2), [0.0], vocab=8)
    assert ids == [2]
    assert logprobs[0] == pytest.approx(float(torch.tensor([2.0, 1.5]).log_softmax(-1)[0]))


def test_a_row_has_the_same_result_in_any_batch() -> None:
    logits = torch.randn(33, 320, generator=torch.Generator().manual_seed(0)) * 4
    noise = uniforms(1, 0, 33).tolist()
    ids, logprobs = sample(logits, Sampling(), noise, vocab=301)
    for row in range(33):
        assert sample(logits[row : row + 1], Sampling(), noise[row : row + 1], vocab=301) == (
            [ids[row]],
            [logprobs[row]],
        )


def test_logits_that_are_no_numbers_are_refused() -> None:
    with pytest.raises(NotFinite):
        sample(torch.tensor([[0.0, math.nan]]), Sampling(), [0.5], vocab=2)
