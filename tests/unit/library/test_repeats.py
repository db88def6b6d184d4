"""What repeats is said the first time, then now and then with its count, and nothing is left uncounted."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.repeats import Repeats

KINDS = st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5)))


@settings(deadline=None)
@given(KINDS)
def test_one_line_of_a_kind_in_each_interval_and_each_event_in_one_line(events: list[tuple[str, float]]) -> None:
    repeats = Repeats(10.0)
    now = told = 0.0
    said: dict[str, float] = {}
    for kind, pause in events:
        now += pause
        lines = repeats.heard(kind, now)
        if lines:
            assert kind not in said or now - said[kind] >= 10.0
            said[kind] = now
        else:
            assert now - said[kind] < 10.0
        told += lines
    assert told + repeats.over() == len(events)


def test_what_begins_anew_is_said_at_once() -> None:
    repeats = Repeats(10.0)
    assert [repeats.heard("gone", now) for now in (0.0, 0.25, 0.5, 10.0)] == [1, 0, 0, 3]
    assert repeats.heard("gone", 10.25) == 0
    assert repeats.over() == 1
    assert repeats.heard("gone", 10.5) == 1
