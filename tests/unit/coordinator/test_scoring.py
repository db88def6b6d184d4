"""Questions for rewards: asked once, and again only when no answer came in its time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from rlharvest.jobs.model import JobSpec, parse
from rlharvest_coordinator.scoring import ASK_AGAIN_S, Questions


def spec(*timeouts: float) -> JobSpec:
    rewards = [{"builtin": "exact_match", "timeout_s": timeout} for timeout in timeouts]
    return parse({"model": "m", "dataset": {"path": "d.jsonl"}, "rewards": rewards})


def test_a_response_is_asked_for_at_once_and_then_not_again() -> None:
    questions = Questions(spec(10.0))
    assert questions.due(7, now=0.0) == 1
    questions.asked[7] = (0.0, 1)
    assert questions.due(7, now=1.0) is None
    assert questions.due(8, now=1.0) == 1


def test_patience_is_longer_than_all_rewards_may_take_one_after_the_other() -> None:
    """A slow reward function is no lost question."""
    assert Questions(spec(10.0, 600.0)).patience_s == ASK_AGAIN_S + 2 * 610.0


@given(st.lists(st.floats(0.0, 500.0), max_size=20))
def test_the_number_of_the_try_rises_by_one_with_each_question(times: list[float]) -> None:
    """Each try is another message: its number is in the message's identity."""
    questions = Questions(spec(10.0))
    tries, last = 0, 0.0
    for now in sorted(times):
        number = questions.due(1, now)
        if number is None:
            assert now - last <= questions.patience_s
        else:
            assert number == tries + 1
            assert tries == 0 or now - last > questions.patience_s
            questions.asked[1] = (now, number)
            tries, last = number, now
