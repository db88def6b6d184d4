"""Drafts are used while they are measured to pay, and measuring that costs little, however noisy the clock."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.speculation.switch import FIRST, ROUND_EVERY, STEPS_LEAST, STEPS_MOST, Switch

CAPS = (0, 4, 32)
RATES = st.floats(0.05, 20.0)
"""Tokens per second of an arm, where drafting nothing makes 1."""

ROUND_MOST = len(CAPS) * (STEPS_MOST + 1)
"""Steps of the longest round."""


@dataclass
class Machine:
    """Steps of known mean rates, noisy if asked: times as those of a busy machine, tokens in bursts."""

    rates: dict[int, float]
    noise: float = 0.0
    """Deviation of the logarithm of a step's time."""
    outliers: float = 0.0
    """Share of steps that take 20 times as long."""
    bursts: float = 0.0
    """Relative deviation of the tokens of a step that drafts."""
    seed: int = 1
    batch: int = 4
    chosen: list[int] = field(default_factory=list)
    spent: float = 0.0
    """Expected seconds of all steps for a token each: what noise gave or took is not in it."""

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def drive(self, switch: Switch, steps: int) -> list[int]:
        """Return what was chosen in each step."""
        chosen = []
        for _ in range(steps):
            cap = switch.choose(self.batch)
            chosen.append(cap)
            tokens = 1000
            if cap and self.bursts:
                tokens = round(1000 * self._random.choice((1 - self.bursts, 1 + self.bursts)))
            seconds = 1 / self.rates[cap]
            self.spent += seconds
            if self.noise:
                seconds *= self._random.lognormvariate(0, self.noise)
            if self._random.random() < self.outliers:
                seconds *= 20
            switch.observe(self.batch, seconds=seconds, tokens=tokens, drafted=cap > 0)
        self.chosen += chosen
        return chosen

    @property
    def speed(self) -> float:
        """Tokens per second, expected, where drafting nothing makes 1."""
        return len(self.chosen) / self.spent


@settings(max_examples=80, deadline=None)
@given(RATES, RATES)
def test_the_fastest_arm_is_used_and_nothing_slower_than_no_drafts(short: float, long: float) -> None:
    rates = {0: 1.0, 4: short, 32: long}
    chosen = Machine(rates).drive(Switch(CAPS), FIRST + ROUND_MOST + ROUND_EVERY)
    used = chosen[FIRST + ROUND_MOST + 1]
    assert rates[used] >= 1.0
    # The error assumed of a step keeps drafts off that would gain less than a tenth.
    assert rates[used] * 1.13 >= max(rates.values())


@settings(max_examples=40, deadline=None)
@given(st.floats(0.05, 0.97), st.floats(0.05, 0.97))
def test_a_slower_arm_is_chosen_in_rounds_only(short: float, long: float) -> None:
    """So many rounds as there may be, and no step more."""
    steps = 6000
    chosen = Machine({0: 1.0, 4: short, 32: long}).drive(Switch(CAPS), steps)
    rounds = 1 + (steps - FIRST) // ROUND_EVERY
    assert sum(cap > 0 for cap in chosen) <= rounds * (len(CAPS) - 1) * (STEPS_MOST + 1)
    runs = "".join("x" if cap else "." for cap in chosen).split("." * ROUND_EVERY)
    assert max(len(run.strip(".")) for run in runs) <= ROUND_MOST


@settings(max_examples=40, deadline=None)
@given(
    slow=st.floats(0.3, 0.93),
    noise=st.floats(0.0, 0.5),
    outliers=st.floats(0.0, 0.05),
    bursts=st.floats(0.05, 0.5),
    seed=st.integers(0, 1 << 20),
)
def test_under_noise_and_outliers_a_slower_arm_is_chosen_in_rounds_and_seldom_else(
    slow: float, noise: float, outliers: float, bursts: float, seed: int
) -> None:
    machine = Machine({0: 1.0, 4: slow, 32: slow}, noise=noise, outliers=outliers, bursts=bursts, seed=seed)
    chosen = machine.drive(Switch(CAPS), 6000)
    assert machine.speed >= 0.97
    # A round that chance decides wrongly is followed by another one after ROUND_EVERY steps at the latest.
    wrong = max(len(run) for run in "".join("x" if cap else "." for cap in chosen).split("." * 2 * len(CAPS)))
    assert wrong <= 3 * (ROUND_EVERY + ROUND_MOST)


@settings(max_examples=20, deadline=None)
@given(st.floats(1.4, 5.0), st.floats(0.0, 0.5), st.floats(0.0, 0.05), st.integers(0, 1 << 20))
def test_under_noise_and_outliers_drafts_that_pay_are_used(
    fast: float, noise: float, outliers: float, seed: int
) -> None:
    machine = Machine({0: 1.0, 4: 1.2, 32: fast}, noise=noise, outliers=outliers, bursts=0.4, seed=seed)
    assert sum(cap > 0 for cap in machine.drive(Switch(CAPS), 6000)) > 0.85 * 6000


@settings(max_examples=20, deadline=None)
@given(st.floats(0.3, 3.0), st.floats(0.3, 3.0))
def test_it_follows_a_change_and_is_never_slower_than_no_drafts_for_long(before: float, after: float) -> None:
    switch = Switch(CAPS)
    Machine({0: 1.0, 4: before, 32: before}).drive(switch, 600)
    chosen = Machine({0: 1.0, 4: after, 32: after}).drive(switch, 12_000)
    settled = chosen[-2000:]
    if after < 0.95:
        assert settled.count(0) > 0.95 * len(settled)
        assert chosen[:400].count(0) > 200
    elif after > 1.2:
        assert settled.count(0) < 0.05 * len(settled)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 0.99))
def test_what_rounds_cost_is_little(rate: float) -> None:
    """Drafts that do not pay cost less than 2 % of the time, the first round included."""
    machine = Machine({0: 1.0, 4: rate, 32: rate})
    machine.drive(Switch(CAPS), 4000)
    assert machine.speed > 0.98


def test_a_machine_that_becomes_slower_does_not_turn_drafts_off_that_pay() -> None:
    switch = Switch(CAPS)
    Machine({0: 1.0, 4: 1.2, 32: 2.0}).drive(switch, 500)
    chosen = Machine({0: 0.4, 4: 0.48, 32: 0.8}).drive(switch, 2000)
    assert chosen.count(32) > 0.9 * len(chosen)


def test_a_single_long_step_changes_nothing() -> None:
    switch = Switch(CAPS)
    Machine({0: 1.0, 4: 1.5, 32: 2.0}).drive(switch, 200)
    assert switch.choose(4) == 32
    before = switch.rates(4)[32]
    switch.observe(4, seconds=1e6, tokens=1000, drafted=True)
    assert switch.choose(4) == 32
    assert switch.rates(4)[32] > 0.9 * before


def test_batches_of_other_sizes_are_judged_apart_and_smaller_ones_begin_as_the_next_larger() -> None:
    switch = Switch(CAPS)
    Machine({0: 1.0, 4: 1.5, 32: 2.0}, batch=4).drive(switch, 200)
    Machine({0: 1.0, 4: 0.5, 32: 0.3}, batch=32).drive(switch, 200)
    assert switch.choose(4) == switch.choose(3) == switch.choose(2) == 32
    assert switch.choose(32) == switch.choose(20) == switch.choose(16) == 0


def test_without_anything_to_draft_it_stays_off_and_looks_again_soon() -> None:
    switch = Switch(CAPS)
    tried = []
    for step in range(4 * ROUND_EVERY):
        cap = switch.choose(1)
        if cap:
            tried.append(step)
        switch.observe(1, seconds=1.0, tokens=1, drafted=False)
    assert tried[-1] > 3 * ROUND_EVERY
    assert len(tried) <= 5 * (len(CAPS) - 1) * (STEPS_LEAST + 1)
    assert switch.rates(1)[32] <= 1.0


@pytest.mark.parametrize("caps", [(0,), (1, 2), (0, 4, 2), (0, 2, 2)])
def test_arms_that_do_not_ascend_from_none_are_refused(caps: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="caps"):
        Switch(caps)
