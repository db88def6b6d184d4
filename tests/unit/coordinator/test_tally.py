"""What a job has had is counted without being kept: the memory of a coordinator does not grow with its jobs."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest_coordinator.ordinals import Ordinals
from rlharvest_coordinator.store.groups import ACCEPTED, COMMITTED, DROPPED, TRAINED
from rlharvest_coordinator.tally import Tally

NUMBERS = st.integers(0, 30)


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), NUMBERS)))
def test_ordinals_are_a_set(changes: list[tuple[bool, int]]) -> None:
    found, model = Ordinals(), set[int]()
    for adds, number in changes:
        if adds:
            found.add(number)
            model.add(number)
        elif number in model:
            found.remove(number)
            model.remove(number)
        else:
            with pytest.raises(KeyError):
                found.remove(number)
        assert len(found) == len(model)
        assert [number in found for number in range(32)] == [number in model for number in range(32)]
        assert [found.below(at) for at in range(32)] == [sum(other < at for other in model) for at in range(32)]
        assert found.stretches == sum(number - 1 not in model for number in model)


@settings(deadline=None)
@given(st.data())
def test_a_tally_agrees_with_one_that_keeps_every_group(data: st.DataObject) -> None:
    tally, states, trained_tokens = Tally(), dict[int, str](), 0
    following = {ACCEPTED: [COMMITTED, DROPPED], COMMITTED: [TRAINED]}
    for _ in range(data.draw(st.integers(0, 40))):
        moving: list[int] = sorted(ordinal for ordinal, state in states.items() if state in following)
        if moving and data.draw(st.booleans()):
            ordinal = data.draw(st.sampled_from(moving))
            after = data.draw(st.sampled_from(following[states[ordinal]]))
            tally.move(ordinal, states[ordinal], after, ordinal)
            states[ordinal] = after
            trained_tokens += ordinal if after == TRAINED else 0
        elif free := sorted({*range(40)} - states.keys()):
            ordinal = data.draw(st.sampled_from(free))
            states[ordinal] = data.draw(st.sampled_from([ACCEPTED, DROPPED]))
            tally.record(ordinal, states[ordinal])
    running = data.draw(st.sets(st.integers(0, 60).filter(lambda ordinal: ordinal not in states)))
    counts = Counter(states.values())
    alive = {ordinal for ordinal, state in states.items() if state != DROPPED}
    assert tally.alive == len(alive)
    assert [ordinal in tally for ordinal in range(60)] == [ordinal in states for ordinal in range(60)]
    assert [tally.dropped(ordinal) for ordinal in range(60)] == [states.get(n) == DROPPED for n in range(60)]
    assert tally.ranks(running) == {ordinal: sum(other < ordinal for other in alive | running) for ordinal in running}
    totals = tally.totals(2, len(running))
    assert totals == {
        "submitted": 2 * (len(states) + len(running)),
        "trained": 2 * counts[TRAINED],
        "dropped": 2 * counts[DROPPED],
        "outstanding": 2 * (counts[ACCEPTED] + counts[COMMITTED] + len(running)),
        "trained_tokens": trained_tokens,
    }


def test_a_tally_does_not_grow_with_the_job() -> None:
    """Ten thousand groups that all ended as they should take what ten take."""
    tally = Tally()
    for ordinal in range(10_000):
        tally.record(ordinal, ACCEPTED)
        tally.move(ordinal, ACCEPTED, COMMITTED)
        tally.move(ordinal, COMMITTED, TRAINED, 1)
    assert (tally._left.stretches, tally._alive.stretches) == (1, 1)
    assert tally.totals(1, 0)["trained_tokens"] == 10_000
