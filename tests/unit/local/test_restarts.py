"""When a child that ended is started again."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.local.restarts import Policy, Restarts


def test_the_pause_doubles_and_too_many_ends_give_the_child_up() -> None:
    restarts = Restarts(Policy(most=4, window_s=60, first_s=0.5, longest_s=3))
    assert [restarts.ended(second) for second in range(5)] == [0.5, 1.0, 2.0, 3, None]


def test_ends_older_than_the_window_are_forgotten() -> None:
    restarts = Restarts(Policy(most=1, window_s=60, first_s=0.5))
    assert restarts.ended(0) == 0.5
    assert restarts.ended(61) == 0.5
    assert restarts.ended(62) is None


@given(st.lists(st.floats(min_value=0, max_value=100), max_size=50), st.integers(1, 10))
def test_it_is_given_up_exactly_when_a_window_holds_more_ends_than_allowed(gaps: list[float], most: int) -> None:
    policy = Policy(most=most, window_s=60)
    restarts = Restarts(policy)
    now = 0.0
    times = []
    for gap in gaps:
        now += gap
        times.append(now)
        pause = restarts.ended(now)
        recent = [time for time in times if now - time <= policy.window_s]
        assert (pause is None) == (len(recent) > most)
        if pause is not None:
            assert policy.first_s <= pause <= policy.longest_s
