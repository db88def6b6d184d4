"""T_seed and N_prem keep their invariants, and find the balance of a system that answers to them."""

from __future__ import annotations

import math

from hypothesis import example, given, settings
from hypothesis import strategies as st
from rlharvest.policies import offload
from rlharvest.policies.offload import Measured, Options, State, decide

SECONDS = st.floats(0, 5000)
CAPACITY = st.one_of(st.just(0.0), st.floats(1, 1e6))
MEASURED = st.builds(
    Measured,
    step_s=st.floats(1, 5000),
    seeded_s=SECONDS,
    trainer_idle_s=SECONDS,
    remote_idle_s=SECONDS,
    train_s=SECONDS,
    remote_s=SECONDS,
    reserved_capacity=st.floats(1, 1e6),
    remote_capacity=CAPACITY,
    next_capacity=CAPACITY,
    tokens=st.floats(0, 1e9),
    switch_s=st.floats(0, 100),
)
STATES = st.builds(State, SECONDS, st.dictionaries(st.integers(0, 100), SECONDS, max_size=6))
OPTIONS = Options()


def measured(**values: float) -> Measured:
    base = {
        "step_s": 300.0,
        "seeded_s": 50.0,
        "trainer_idle_s": 0.0,
        "remote_idle_s": 0.0,
        "train_s": 200.0,
        "remote_s": 250.0,
        "reserved_capacity": 4000.0,
        "remote_capacity": 10_000.0,
        "next_capacity": 10_000.0,
        "tokens": 3e6,
    }
    return Measured(**(base | values))


@settings(deadline=None)
@given(STATES, MEASURED)
@example(State(0.0), measured(train_s=2.2e-309))
def test_t_seed_is_never_negative_and_infinite_only_without_preemptible_capacity(state: State, one: Measured) -> None:
    after, decision = decide(state, one, OPTIONS)
    assert decision.seed_s >= 0
    assert math.isinf(decision.seed_s) == (one.next_capacity == 0)
    assert math.isfinite(after.seed_s)
    assert after.seed_s >= 0
    assert decision.worth >= 0
    assert math.isfinite(decision.worth)
    assert decision.reason
    assert (after, decision) == decide(state, one, OPTIONS)


@settings(deadline=None)
@given(STATES, MEASURED)
def test_waiting_trainers_never_shorten_it_and_idle_workers_never_lengthen_it(state: State, one: Measured) -> None:
    bucket = offload.bucket_of(one.remote_capacity, OPTIONS)
    if bucket is None or bucket != offload.bucket_of(one.next_capacity, OPTIONS):
        return
    after, decision = decide(state, one, OPTIONS)
    imbalance = one.trainer_idle_s - one.remote_idle_s
    if abs(imbalance) <= OPTIONS.deadband * one.step_s:
        assert after.seed_s == state.seed_s
    elif imbalance > 0:
        assert after.seed_s >= state.seed_s
    else:
        assert after.seed_s <= state.seed_s
    assert decision.seed_s == 0 or decision.seed_s >= one.switch_s


def test_a_capacity_that_was_balanced_before_is_recalled() -> None:
    state, _ = decide(State(100.0), measured(trainer_idle_s=40), OPTIONS)
    assert state.seed_s == 120
    away, decision = decide(state, measured(next_capacity=20_000), OPTIONS)
    assert "never seen" in decision.reason
    assert decision.seed_s < 120, "more capacity needs less seeding"
    back, decision = decide(away, measured(remote_capacity=20_000, next_capacity=10_000), OPTIONS)
    assert decision.seed_s == back.seed_s == 120


def test_the_memory_is_keyed_by_capacity_not_by_count() -> None:
    """Eight slow workers and two fast ones of the same tokens/s together share what was found."""
    eight_slow, two_fast = 8 * 1250.0, 2 * 5000.0
    assert offload.bucket_of(eight_slow, OPTIONS) == offload.bucket_of(two_fast, OPTIONS)


def test_between_two_known_capacities_it_interpolates() -> None:
    low, high = offload.bucket_of(1000, OPTIONS), offload.bucket_of(4000, OPTIONS)
    assert low is not None
    assert high is not None
    state = State(50.0, {low: 200.0, high: 20.0})
    value = offload.reconsider(state, 50.0, 2000, OPTIONS)
    assert 20 < value < 200
    assert offload.reconsider(state, 50.0, 100_000, OPTIONS) == 50, "beyond what is known nothing changes mid-step"
    assert math.isinf(offload.reconsider(state, 50.0, 0.0, OPTIONS))


def test_seeding_that_costs_more_than_it_lasts_is_none() -> None:
    _, decision = decide(State(6.0), measured(switch_s=11.0), OPTIONS)
    assert decision.seed_s == 0
    assert "cost" in decision.reason


def test_seeding_ends_by_time_or_work_and_never_without_anybody_to_go_on() -> None:
    assert offload.seeding_over(elapsed_s=1, seed_s=99, unfinished=0, remote_capacity=0)
    assert offload.seeding_over(elapsed_s=99, seed_s=99, unfinished=5, remote_capacity=10)
    assert offload.seeding_over(elapsed_s=98, seed_s=99, unfinished=5, remote_capacity=10) is None
    assert offload.seeding_over(elapsed_s=1e9, seed_s=0, unfinished=5, remote_capacity=0) is None


@settings(deadline=None)
@given(st.floats(1, 1e8), st.floats(0, 1e5), st.floats(1, 1e5), st.floats(0, 1000), st.booleans())
def test_engines_wake_only_when_the_trainer_has_nothing_and_it_pays(
    remaining: float, remote: float, reserved: float, switch: float, trainable: bool
) -> None:
    wakes = offload.wake(
        remaining_tokens=remaining,
        remote_capacity=remote,
        reserved_capacity=reserved,
        switch_s=switch,
        trainable=trainable,
    )
    assert not (wakes and trainable)
    if not trainable and remote == 0:
        assert wakes, "nobody else is there"
    if wakes and remote > 0:
        assert remaining / remote > 2 * switch


@settings(deadline=None)
@given(st.floats(1, 12), st.floats(0.2, 2.0))
def test_the_feedback_finds_the_balance_of_a_fluid_system(instances: float, start: float) -> None:
    """Work that can be divided at will: T_seed converges to the time at which rollout ends with the training."""
    reserved, remote, tokens, train_s = 8000.0, instances * 1500.0, 4e6, 200.0
    target = offload.balanced(tokens=tokens, train_s=train_s, reserved=reserved, remote=remote)
    state = State(max(5.0, start * target))
    for _ in range(40):
        seed = state.seed_s
        # Rollout after the seeding, against the training that starts with it.
        rest = max(0.0, tokens - (reserved + remote) * seed) / remote
        one = Measured(
            step_s=seed + max(rest, train_s),
            seeded_s=seed,
            trainer_idle_s=max(0.0, rest - train_s),
            remote_idle_s=max(0.0, train_s - rest),
            train_s=train_s,
            remote_s=seed + rest,
            reserved_capacity=reserved,
            remote_capacity=remote,
            next_capacity=remote,
            tokens=tokens,
        )
        options = Options(gain=0.9 * remote / (reserved + remote))
        state, _ = decide(state, one, options)
    assert abs(state.seed_s - target) <= 0.05 * (target + train_s)
