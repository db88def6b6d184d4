"""An engine makes the tokens it should in the time it should, whatever comes in between."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.simulator.clock import Clock, Timer
from rlharvest.simulator.engine import Engine, Response, Speed

SPEED = Speed(overhead_s=0.002, weights_s=0.008, flop_s=4e-5, context_s=4e-8, prefill_s=3e-5, cache=100_000, slots=16)
FREE = Speed(overhead_s=0.01, weights_s=0.0, flop_s=0.0, context_s=1e-12, prefill_s=0.0, cache=10**9, slots=1000)


def response(handle: int, target: int, prompt: int = 10, group: int | None = None) -> Response:
    return Response(handle=handle, group=handle if group is None else group, prompt=prompt, target=target)


def drain(engine: Engine, now: float = 0.0) -> dict[int, float]:
    """Run an engine until nothing is left; return when each response finished."""
    done: dict[int, float] = {}
    for _ in range(100_000):
        at = engine.next_event()
        if at is None:
            assert not engine.held, "it stands still with work"
            return done
        assert at >= now - 1e-9
        now = max(now, at)
        engine.advance(now)
        for finished in engine.collect():
            assert finished.length == finished.target
            assert finished.handle not in done
            done[finished.handle] = now
        assert engine.context <= engine.speed.cache * (1 + 1e-6) or len(engine.running) == 1
    raise AssertionError("it does not come to an end")


def test_one_response_takes_the_sum_of_its_steps() -> None:
    engine = Engine("e", "k", SPEED, preemptible=True)
    engine.put(response(1, 500, prompt=100))
    expected = 100 * SPEED.prefill_s + sum(SPEED.step_s(1, 100 + k + 0.5) for k in range(500))
    assert drain(engine)[1] == pytest.approx(expected, rel=1e-9)


def test_a_fluid_step_is_the_sum_of_discrete_ones() -> None:
    """Advanced in a thousand pieces or in one, the same tokens come out at the same time."""
    one, many = (Engine("e", "k", SPEED, preemptible=True) for _ in range(2))
    for engine in (one, many):
        for handle in range(5):
            engine.put(response(handle, 400 + handle))
    for k in range(1, 1001):
        many.advance(k * 0.004)
    one.advance(4.0)
    assert many.steps == pytest.approx(one.steps, rel=1e-9)
    assert many.context == pytest.approx(one.context, rel=1e-9)
    assert drain(many, 4.0) == pytest.approx(drain(one, 4.0), rel=1e-6)


def test_a_prompt_is_prefilled_once_for_a_group_that_is_there_together() -> None:
    engine = Engine("e", "k", SPEED, preemptible=True)
    for handle in range(8):
        engine.put(response(handle, 50, prompt=1000, group=7))
    assert engine.prefilled == 1000


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 9000), st.integers(1, 3000), st.integers(0, 5)), min_size=1, max_size=40),
    st.lists(st.tuples(st.floats(0, 60), st.integers(0, 39)), max_size=12),
)
def test_every_response_gets_exactly_its_tokens_wherever_it_moves(
    shapes: list[tuple[int, int, int]], moves: list[tuple[float, int]]
) -> None:
    """Two engines; responses are taken from one and put into the other at any time. The cache is small and overflows."""
    clock = Clock()
    engines = [Engine(f"e{n}", "k", SPEED, preemptible=True) for n in range(2)]
    done: dict[int, int] = {}

    def settle(engine: Engine, timer: Timer) -> None:
        engine.advance(clock.now)
        for finished in engine.collect():
            assert finished.handle not in done
            done[finished.handle] = finished.length
        following = engine.next_event()
        if following is not None:
            timer.at(following)

    timers = [
        Timer(clock, lambda: settle(engines[0], timers[0])),
        Timer(clock, lambda: settle(engines[1], timers[1])),
    ]

    def move(index: int) -> None:
        for source, target in ((0, 1), (1, 0)):
            held = [*engines[source].running, *(item.handle for item in engines[source].queue)]
            if index in held:
                engines[source].advance(clock.now)
                for finished in engines[source].collect():
                    done[finished.handle] = finished.length
                if index in done:
                    return
                moved = engines[source].take(index)
                assert moved.length < moved.target
                engines[target].advance(clock.now)
                engines[target].put(moved)
                settle(engines[0], timers[0])
                settle(engines[1], timers[1])
                return

    for handle, (target, prompt, group) in enumerate(shapes):
        engines[handle % 2].put(response(handle, target, prompt, group))
    for at, index in moves:
        clock.at(at, lambda index=index: move(index))  # type: ignore[misc]  # mypy cannot infer a lambda's default
    settle(engines[0], timers[0])
    settle(engines[1], timers[1])
    clock.run(until=1e9)
    assert done == {handle: target for handle, (target, _, _) in enumerate(shapes)}
    assert all(engine.context == pytest.approx(0, abs=1e-3) for engine in engines)


def test_what_is_taken_away_keeps_its_tokens_short_of_what_was_not_published() -> None:
    engine = Engine("e", "k", FREE, preemptible=True)
    engine.put(response(1, 1000))
    engine.advance(5.0)
    (taken,) = engine.clear(lost=20)
    length = taken.length
    assert length == pytest.approx(480, abs=1)
    engine.put(taken)
    engine.advance(6.0)
    (again,) = engine.clear(keep=False)
    assert again.length == length, "only what this owner made is lost"


def test_a_stall_holds_everybody_up() -> None:
    engine = Engine("e", "k", FREE, preemptible=True)
    engine.put(response(1, 100))
    engine.stall(3.0)
    assert drain(engine)[1] == pytest.approx(4.0, rel=1e-6)
