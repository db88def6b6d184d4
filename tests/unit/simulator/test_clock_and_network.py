"""Time goes forward, and a link is shared fairly."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.simulator.clock import Clock, Timer
from rlharvest.simulator.network import Link


@settings(deadline=None)
@given(st.lists(st.floats(0, 100), max_size=30))
def test_events_happen_in_order_of_time_and_of_setting(times: list[float]) -> None:
    clock = Clock()
    happened: list[tuple[float, int]] = []
    for number, at in enumerate(times):
        clock.at(at, lambda number=number: happened.append((clock.now, number)))  # type: ignore[misc]  # its default
    clock.run(until=1000)
    assert happened == sorted((at, number) for number, at in enumerate(times))


def test_the_past_is_now_and_only_the_newest_setting_of_a_timer_happens() -> None:
    clock = Clock()
    seen: list[float] = []
    timer = Timer(clock, lambda: seen.append(clock.now))
    timer.at(5)
    timer.at(3)
    clock.at(2, lambda: clock.at(1, lambda: seen.append(clock.now)))
    clock.run(until=10)
    assert seen == [2, 3]
    timer.at(20)
    timer.cancel()
    clock.run(until=100)
    assert seen == [2, 3]


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.floats(0, 50), st.floats(1, 1000), st.floats(1, 50)), min_size=1, max_size=12),
    st.floats(5, 100),
)
def test_bytes_arrive_once_and_never_faster_than_a_link(flows: list[tuple[float, float, float]], base: float) -> None:
    clock = Clock()
    link = Link(clock, base)
    arrived: dict[str, float] = {}

    def arrive(name: str) -> None:
        assert name not in arrived
        arrived[name] = clock.now

    def start(name: str, size: float, limit: float) -> None:
        link.pull(name, size, limit, lambda: arrive(name))
        rates = link.rates()
        assert sum(rates.values()) <= base * (1 + 1e-9)

    for number, (at, size, limit) in enumerate(flows):
        clock.at(at, lambda n=f"w{number}", s=size, r=limit: start(n, s, r))  # type: ignore[misc]  # its defaults
    clock.run(until=1e9)
    assert len(arrived) == len(flows)
    for number, (at, size, limit) in enumerate(flows):
        assert arrived[f"w{number}"] >= at + size / min(limit, base) - 2e-3
    total = sum(size for _, size, _ in flows)
    assert max(arrived.values()) >= min(at for at, _, _ in flows) + total / base - 2e-3 * len(flows)


def test_one_sender_is_shared_equally_and_peers_add_to_it() -> None:
    clock = Clock()
    link = Link(clock, 100.0)
    arrived: list[tuple[str, float]] = []
    link.pull("a", 100, 1000, lambda: arrived.append(("a", clock.now)))
    link.pull("b", 100, 1000, lambda: arrived.append(("b", clock.now)))
    assert link.rates() == {"a": 50, "b": 50}
    link.lend(100.0)
    assert link.rates() == {"a": 100, "b": 100}
    link.drop("b")
    clock.run(until=10)
    assert arrived == [("a", pytest.approx(0.5))]
