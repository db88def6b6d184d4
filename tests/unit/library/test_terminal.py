"""When a response has ended."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.spans import Finish
from rlharvest.terminal import terminal

IDS = st.lists(st.integers(0, 5), max_size=12)


@given(IDS, st.integers(1, 12))
def test_a_response_ends_at_its_end_token_or_its_budget_and_not_before(ids: list[int], budget: int) -> None:
    found = terminal(ids, eos_ids={0}, budget=budget)
    if ids and ids[-1] == 0:
        assert found is Finish.EOS
    elif len(ids) >= budget:
        assert found is Finish.LENGTH
    else:
        assert found is Finish.NONE


def test_an_end_token_in_the_middle_is_not_the_end() -> None:
    """The engine stops at the first; what came after it is a token like any other."""
    assert terminal([0, 3], eos_ids={0}, budget=9) is Finish.NONE


def test_the_end_token_at_the_budget_is_an_end_token() -> None:
    assert terminal([3, 0], eos_ids={0}, budget=2) is Finish.EOS


def test_a_stop_string_ends_it_wherever_it_stands_in_the_text() -> None:
    assert terminal([1], eos_ids={0}, budget=9, stop=["END"], text="to the END.") is Finish.STOP
    assert terminal([1], eos_ids={0}, budget=9, stop=["END"], text="to the E") is Finish.NONE
    assert terminal([1], eos_ids={0}, budget=9, stop=["END"], text=None) is Finish.NONE


def test_no_end_tokens_leaves_the_budget() -> None:
    assert terminal([], eos_ids=(), budget=1) is Finish.NONE
    assert terminal([7], eos_ids=(), budget=1) is Finish.LENGTH
