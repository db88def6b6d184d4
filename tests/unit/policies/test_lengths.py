"""Predicted lengths follow their prompts and the drift, and say honestly how sure they are."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.policies.lengths import SHARES, Lengths

Batch = list[tuple[bytes, list[int]]]
LIMIT = 14_000


def world(
    seed: int, *, prompts: int, epochs: int, grow: float, tails: bool = False, median: float = 2000.0
) -> Iterator[Batch]:
    """Batches of 64 prompts and 8 responses each: effects of prompts, chance, and growth over the whole run.

    tails: chance has heavier tails than the normal distribution.
    """
    chance = random.Random(seed)
    effects = [chance.gauss(0, 0.8) for _ in range(prompts)]
    batches = epochs * prompts // 64
    for number in range(batches):
        if number * 64 % prompts < 64:
            order = chance.sample(range(prompts), prompts)
        drift = math.log(grow) * number / batches
        batch = []
        for prompt in order[number * 64 % prompts :][:64]:
            noise = [
                chance.gauss(0, 0.5) / (math.sqrt(chance.gammavariate(2, 0.5)) if tails else 1.0) for _ in range(8)
            ]
            lengths = [round(math.exp(math.log(median) + effects[prompt] + drift + one)) for one in noise]
            batch.append((str(prompt).encode(), [min(max(1, length), LIMIT) for length in lengths]))
        yield batch


@settings(max_examples=4, deadline=None)
@given(st.integers(0, 1000), st.sampled_from([0.7, 1.0, 2.0]), st.booleans())
def test_quantiles_cover_what_they_say(seed: int, grow: float, tails: bool) -> None:
    """Over three epochs, new prompts and known ones, whatever the tails and the drift."""
    history = Lengths(LIMIT)
    for batch in world(seed, prompts=320, epochs=3, grow=grow, tails=tails):
        history.observe(batch)
    for share, coverage in history.coverage.items():
        if coverage.of > 500:
            assert coverage.share == pytest.approx(share, abs=0.05), share
    assert history.coverage[0.5].of > 500


@settings(max_examples=3, deadline=None)
@given(st.integers(0, 1000))
def test_a_known_prompt_is_predicted_better_than_a_new_one(seed: int) -> None:
    history = Lengths(LIMIT)
    batches = list(world(seed, prompts=320, epochs=2, grow=2.0))
    errors = []
    for batch in batches:
        errors.append(
            sum(abs(math.log(sum(lengths) / len(lengths) / history.predict(key).mean)) for key, lengths in batch) / 64
        )
        history.observe(batch)
    first, second = errors[: len(errors) // 2], errors[len(errors) // 2 :]
    assert sum(second) < 0.5 * sum(first)
    assert all(history.predict(key).known for key, _ in batches[-1])
    assert not history.predict(b"new").known


@settings(max_examples=8, deadline=None)
@given(st.integers(0, 100), st.sampled_from([0.3, 0.5, 2.0, 3.0]))
def test_predictions_follow_when_all_lengths_grow_by_a_factor(seed: int, factor: float) -> None:
    """Also of the prompts that have not come again since."""
    history = Lengths(100 * LIMIT)
    batches = list(world(seed, prompts=256, epochs=2, grow=1.0))
    for batch in batches[:4]:
        history.observe(batch)
    untouched = batches[4 - 1][0][0]
    before, level = history.predict(untouched).mean, history.growth
    for _ in range(8):
        for batch in batches[:3]:
            history.observe([(key, [max(1, round(length * factor)) for length in lengths]) for key, lengths in batch])
    assert history.growth / level == pytest.approx(factor, rel=0.35)
    assert history.predict(untouched).mean / before == pytest.approx(factor, rel=0.35)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.integers(0, 5), st.lists(st.integers(0, 300), max_size=4)).map(
            lambda pair: (bytes([pair[0]]), pair[1])
        ),
        max_size=12,
    ),
    st.integers(1, 200),
    st.integers(0, 200),
)
def test_predictions_are_possible_lengths(batch: Batch, limit: int, generated: int) -> None:
    history = Lengths(limit, most=3)
    for at in range(0, len(batch), 4):
        history.observe(batch[at : at + 4])
        assert len(history) <= 3
    for key in [bytes([number]) for number in range(6)]:
        prediction = history.predict(key)
        quantiles = [prediction.quantile(share) for share in (0.0, *SHARES, 1.0)]
        assert quantiles == sorted(quantiles)
        assert all(1 <= value <= limit for value in [*quantiles, prediction.mean])
        done = min(generated, limit)
        ends = [prediction.beyond(done, share) for share in SHARES]
        assert ends == sorted(ends)
        assert all(done <= value <= limit for value in ends)
        shares = [prediction.share(length) for length in range(0, limit + 1, max(1, limit // 7))]
        assert shares == sorted(shares)
        assert prediction.share(limit) == 1.0


@functools.cache
def _taught() -> Lengths:
    history = Lengths(10**9)
    for batch in world(3, prompts=128, epochs=1, grow=1.0):
        history.observe(batch)
    return history


@settings(deadline=None)
@given(st.floats(0.02, 0.98))
def test_a_share_and_its_quantile_are_inverse(share: float) -> None:
    prediction = _taught().predict(b"7")
    assert prediction.share(prediction.quantile(share)) == pytest.approx(share, abs=1e-6)


def test_the_prompts_that_were_longest_unseen_are_forgotten_first() -> None:
    history = Lengths(100, most=2)
    history.observe([(b"a", [5]), (b"b", [5])])
    history.observe([(b"a", [5])])
    history.observe([(b"c", [5])])
    assert [history.predict(key).known for key in (b"a", b"b", b"c")] == [True, False, True]


def test_nothing_is_known_before_the_first_batch() -> None:
    history = Lengths(100)
    history.observe([(b"a", [])])
    assert history.coverage[0.5].share is None
    assert history.growth == 1.0
    assert len(history) == 0


def test_at_the_limit_a_length_counts_as_at_least_that() -> None:
    """When half of all responses are cut, quantiles above the median are at the limit, and are not counted as right."""
    history = Lengths(1000)
    chance = random.Random(5)
    for number in range(60):
        lengths = [
            [min(1000, max(1, round(1000 * math.exp(chance.gauss(0, 0.5))))) for _ in range(8)] for _ in range(32)
        ]
        history.observe([(f"{number} {at}".encode(), each) for at, each in enumerate(lengths)])
    assert history.predict(b"new").quantile(0.75) == pytest.approx(1000, rel=0.05)
    share = history.coverage[0.25].share
    assert share == pytest.approx(0.25, abs=0.05)
