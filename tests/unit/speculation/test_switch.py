"""Drafts are used while they are measured to pay, and trying them costs little."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.speculation.switch import MARGIN, TRIAL_EVERY, TRIAL_STEPS, Switch

CAPS = (0, 4, 32)
RATES = st.floats(0.05, 20.0)
"""Tokens per second of an arm, where drafting nothing makes 1."""


def drive(switch: Switch, rates: dict[int, float], steps: int, *, batch: int = 4, noise: float = 0.0) -> list[int]:
    """Return what was chosen in each step; a step makes `batch` tokens and takes as long as its arm's rate says."""
    rng = random.Random(1)
    chosen = []
    for _ in range(steps):
        cap = switch.choose(batch)
        chosen.append(cap)
        seconds = batch / rates[cap] * rng.uniform(1 - noise, 1 + noise)
        switch.observe(batch, seconds=seconds, tokens=batch, drafted=cap > 0)
    return chosen


@settings(max_examples=80, deadline=None)
@given(RATES, RATES)
def test_the_fastest_arm_is_used_and_nothing_slower_than_no_drafts(short: float, long: float) -> None:
    rates = {0: 1.0, 4: short, 32: long}
    chosen = drive(Switch(CAPS), rates, 3 * TRIAL_EVERY)
    settled = chosen[8 * TRIAL_STEPS :]
    used = max(set(settled), key=settled.count)
    assert rates[used] * (1 + MARGIN) ** 2 >= max(rates.values())
    assert rates[used] >= 1.0
    trials = sum(cap != used for cap in settled)
    assert trials <= 4 * (len(CAPS) - 1) * TRIAL_STEPS


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 3.0), st.floats(0.3, 3.0))
def test_it_follows_a_change_and_is_never_slower_than_no_drafts_for_long(before: float, after: float) -> None:
    switch = Switch(CAPS)
    drive(switch, {0: 1.0, 4: before, 32: before}, 600)
    rates = {0: 1.0, 4: after, 32: after}
    chosen = drive(switch, rates, 12_000)
    settled = chosen[-2000:]
    if after < 0.95:
        assert settled.count(0) > 0.95 * len(settled)
        assert chosen[:400].count(0) > 200
    elif after > 1.2:
        assert settled.count(0) < 0.05 * len(settled)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.4, 0.9))
def test_what_trials_cost_is_little(rate: float) -> None:
    """Drafts that do not pay cost less than 3 % of the time, the first trials included."""
    rates = {0: 1.0, 4: rate, 32: rate}
    chosen = drive(Switch(CAPS), rates, 4000)
    seconds = sum(1 / rates[cap] for cap in chosen)
    assert len(chosen) / seconds > 0.97


def test_noise_does_not_turn_drafts_on_that_do_not_pay() -> None:
    chosen = drive(Switch(CAPS), {0: 1.0, 4: 0.8, 32: 0.7}, 5000, noise=0.3)
    assert chosen.count(0) > 4500


def test_a_single_long_step_changes_nothing() -> None:
    switch = Switch(CAPS)
    drive(switch, {0: 1.0, 4: 1.5, 32: 2.0}, 200)
    assert switch.choose(4) == 32
    switch.observe(4, seconds=1e6, tokens=4, drafted=True)
    assert switch.choose(4) == 32


def test_batches_of_other_sizes_are_judged_apart() -> None:
    switch = Switch(CAPS)
    drive(switch, {0: 1.0, 4: 1.5, 32: 2.0}, 200, batch=2)
    drive(switch, {0: 1.0, 4: 0.5, 32: 0.3}, 200, batch=32)
    assert switch.choose(2) == 32
    assert switch.choose(32) == 0
    assert switch.choose(20) == 0


def test_without_anything_to_draft_it_stays_off_and_looks_again_soon() -> None:
    switch = Switch(CAPS)
    tried = []
    for step in range(4 * TRIAL_EVERY):
        cap = switch.choose(1)
        if cap:
            tried.append(step)
        switch.observe(1, seconds=1.0, tokens=1, drafted=False)
    assert tried[-1] > 3 * TRIAL_EVERY
    assert len(tried) <= 5 * 2 * TRIAL_STEPS
    assert switch.rates(1)[32] == 0


@pytest.mark.parametrize("caps", [(0,), (1, 2), (0, 4, 2), (0, 2, 2)])
def test_arms_that_do_not_ascend_from_none_are_refused(caps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="caps"):
        Switch(caps)
