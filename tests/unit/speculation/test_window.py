"""The draft window grows by additions and falls back on a rejection."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.speculation.options import WINDOW_MAX
from rlharvest.speculation.window import WINDOW_START, WINDOW_STEP, next_window

DRAFTS = st.lists(st.tuples(st.integers(0, 40), st.floats(0, 1)), max_size=60)


@given(DRAFTS, st.integers(1, 64))
def test_it_stays_within_its_bounds_and_moves_by_the_rule(drafts: list[tuple[int, float]], most: int) -> None:
    window = min(WINDOW_START, most)
    for drafted, share in drafts:
        drafted = min(drafted, window)
        accepted = int(drafted * share)
        following = next_window(window, drafted=drafted, accepted=accepted, most=most)
        assert 1 <= following <= most
        if not drafted:
            assert following == window
        elif accepted < drafted:
            assert following == min(WINDOW_START, most)
        else:
            assert following == min(window + WINDOW_STEP, most)
        window = following


def test_the_constants_are_those_of_the_paper() -> None:
    assert (WINDOW_START, WINDOW_STEP, WINDOW_MAX) == (2, 2, 32)
