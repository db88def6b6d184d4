"""The faults of a chaos run are a pure function of its seed, so that a seed that failed can be played again."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.schedule import BUS, SPARED, dump, load, process, schedule

SEEDS = st.integers(0, 2**32)


@given(SEEDS, st.floats(0.5, 30), st.integers(SPARED + 1, 16))
@settings(max_examples=30, deadline=None)
def test_same_seed_same_faults_whatever_was_drawn_before(seed: int, minutes: float, workers: int) -> None:
    first = schedule(seed, minutes=minutes, workers=workers)
    schedule(seed + 1, minutes=minutes, workers=workers)
    assert schedule(seed, minutes=minutes, workers=workers) == first
    assert load(dump(first)) == first


@given(SEEDS)
@settings(max_examples=30, deadline=None)
def test_eight_minutes_have_enough_faults_and_kills_of_every_kind(seed: int) -> None:
    faults = schedule(seed, minutes=8, workers=8)
    assert len(faults) >= 150
    assert sum(fault.is_kill for fault in faults) >= 25
    assert {fault.kind for fault in faults} == {
        *("kill", "empty", "restart", "stop", "black_hole", "slow_disk", "slow_link", "clock", "duplicate", "late")
    }
    assert faults[-1].at <= 8 * 60 * 1.2


@given(SEEDS, st.floats(0.5, 20), st.integers(SPARED + 1, 12))
@settings(max_examples=50, deadline=None)
def test_nobody_is_hit_twice_at_once_and_some_workers_are_left_alone(seed: int, minutes: float, workers: int) -> None:
    busy: dict[str, float] = {}
    at = 0.0
    for fault in schedule(seed, minutes=minutes, workers=workers):
        assert fault.at > at
        at = fault.at
        if fault.target == BUS:
            continue
        assert busy.get(process(fault.target), 0.0) <= at
        busy[process(fault.target)] = at + fault.seconds
        hit = [name for name, until in busy.items() if name.startswith("rollout") and until > at]
        assert len(hit) <= workers - SPARED
