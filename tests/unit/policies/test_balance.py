"""What moves, moves once, for a reason, and comes to an end."""

from __future__ import annotations

import time
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.policies import balance
from rlharvest.policies.balance import Balancer, Load, Options, Refuge, Running, Straggler


def steps(kind: str, batch: float, context: float) -> float:
    """Seconds of a step: fast workers take half of what slow ones take, responses cost what they read."""
    return (0.008 + 4e-5 * batch + 4e-8 * batch * context) * (0.5 if kind == "fast" else 1.0)


LOADS = st.lists(
    st.builds(
        Load,
        worker=st.sampled_from([f"w{n}" for n in range(8)]),
        kind=st.sampled_from(["fast", "slow"]),
        running=st.integers(0, 60),
        pending=st.integers(0, 20),
        slots=st.just(64),
        context=st.floats(0, 8000),
        version=st.integers(0, 2),
        full=st.booleans(),
    ),
    unique_by=lambda load: load.worker,
)
REMAINING = st.floats(0, 20_000)


@settings(deadline=None)
@given(LOADS, REMAINING, st.integers(1, 100))
def test_without_an_event_calls_come_to_an_end_and_nothing_moves_back(
    loads: list[Load], remaining: float, most: int
) -> None:
    """Responses carry the workers they were at: none is ever at one of them again, and after few calls nothing moves."""
    balancer = Balancer(steps)
    at: dict[str, list[list[str]]] = {}
    for load in loads:
        balancer.update(load)
        at[load.worker] = [[load.worker] for _ in range(load.running + load.pending)]
    total = sum(load.running + load.pending for load in loads)
    for _ in range(total + 2):
        moves = balancer.moves(remaining=remaining, most=most)
        assert sum(move.n for move in moves) <= most
        if not moves:
            break
        for move in moves:
            for _ in range(move.n):
                # The one that moved last moves first: the worst for coming back.
                response = at[move.source].pop()
                assert move.target not in response, "a response moved back"
                response.append(move.target)
                at[move.target].append(response)
    else:
        pytest.fail("it does not come to an end")
    assert balancer.moves(remaining=remaining, most=most) == []
    assert all(len(response) <= 2 for responses in at.values() for response in responses), "a response moved twice"


@settings(deadline=None)
@given(LOADS, REMAINING)
def test_moves_respect_slots_versions_and_who_gave(loads: list[Load], remaining: float) -> None:
    balancer = Balancer(steps)
    before = {load.worker: load for load in loads}
    for load in loads:
        balancer.update(load)
    moves = balancer.moves(remaining=remaining)
    gave, received = {move.source for move in moves}, {move.target for move in moves}
    assert not gave & received
    moved: Counter[str] = Counter()
    for move in moves:
        assert before[move.target].version >= before[move.source].version
        assert not before[move.target].full
        assert not before[move.target].pending
        moved[move.target] += move.n
        moved[move.source] -= move.n
    for name, load in before.items():
        now = balancer.load(name)
        assert now.running + now.pending == load.running + load.pending + moved[name]
        if name in received:
            assert now.running <= load.slots
        if name in gave and load.running:
            assert now.running >= 1


def test_what_waits_goes_to_who_is_free() -> None:
    balancer = Balancer(steps)
    balancer.update(Load(worker="crowded", kind="slow", running=64, pending=6, slots=64))
    balancer.update(Load(worker="free", kind="slow", running=2, pending=0, slots=4))
    (move,) = balancer.moves(remaining=0)
    assert (move.source, move.target, move.n, move.running) == ("crowded", "free", 2, False)


def test_on_the_flat_part_nothing_moves_and_above_it_what_pays_does() -> None:
    flat = Balancer(lambda kind, batch, context: 0.01)
    flat.update(Load(worker="a", kind="x", running=60, pending=0, slots=64, context=1000))
    flat.update(Load(worker="b", kind="x", running=0, pending=0, slots=64))
    assert flat.moves(remaining=5000) == []
    steep = Balancer(lambda kind, batch, context: 0.01 + 0.001 * batch)
    steep.update(Load(worker="a", kind="x", running=60, pending=0, slots=64, context=1000))
    steep.update(Load(worker="b", kind="x", running=0, pending=0, slots=64))
    (move, *_) = steep.moves(remaining=5000)
    assert move.running
    assert move.n > 1
    # What it saves would not pay for prefilling it again.
    steep.update(Load(worker="a", kind="x", running=61, pending=0, slots=64, context=1000))
    steep.update(Load(worker="b", kind="x", running=1, pending=0, slots=64))
    assert steep.moves(remaining=1) == []


def test_an_unknown_throughput_moves_nothing_that_runs() -> None:
    balancer = Balancer(lambda kind, batch, context: 0.0)
    balancer.update(Load(worker="a", kind="x", running=60, pending=0, slots=64, context=1000))
    balancer.update(Load(worker="b", kind="x", running=0, pending=0, slots=64))
    assert balancer.moves(remaining=1e6) == []


def test_a_worker_that_is_gone_takes_part_in_nothing() -> None:
    balancer = Balancer(steps)
    balancer.update(Load(worker="a", kind="slow", running=64, pending=9, slots=64))
    balancer.update(Load(worker="b", kind="slow", running=0, pending=0, slots=64))
    balancer.remove("b")
    assert balancer.moves(remaining=1e5) == []
    assert len(balancer) == 1


@settings(deadline=None)
@given(st.integers(1, 500), st.one_of(st.none(), st.integers(1, 500)), st.integers(0, 20), st.booleans())
def test_workers_are_offered_at_most_their_slots_and_all_of_them_unless_others_join(
    slots: int, plateau: int | None, theta: int, joining: bool
) -> None:
    offered = balance.bound(slots=slots, plateau=plateau, theta=theta, joining=joining)
    assert 1 <= offered <= slots
    if not joining or plateau is None:
        assert offered == slots


@settings(deadline=None)
@given(
    st.lists(st.builds(Running, handle=st.integers(0, 999), length=st.integers(0, 9), moved=st.integers(0, 5))),
    st.integers(0, 9),
)
def test_the_cheapest_to_prefill_move_and_none_moves_for_ever(running: list[Running], n: int) -> None:
    chosen = balance.choose(running, n)
    assert len(chosen) <= n
    by_handle = {item.handle: item for item in running if item.moved < 4}
    assert set(chosen) <= set(by_handle)


STRAGGLERS = st.lists(
    st.builds(
        Straggler,
        handle=st.integers(0, 99),
        worker=st.sampled_from(["a", "b", "c"]),
        length=st.integers(0, 10_000),
        token_s=st.floats(0.001, 1),
        remaining=st.floats(0, 10_000),
        version=st.integers(0, 2),
        moved=st.integers(0, 5),
    ),
    unique_by=lambda item: item.handle,
)
REFUGES = st.lists(
    st.builds(
        Refuge,
        worker=st.sampled_from(["a", "b", "c"]),
        token_s=st.floats(0.001, 1),
        room=st.integers(0, 3),
        version=st.integers(0, 2),
    ),
    unique_by=lambda item: item.worker,
)


@settings(deadline=None)
@given(STRAGGLERS, REFUGES)
def test_hedges_are_bounded_pay_and_respect_versions(stragglers: list[Straggler], refuges: list[Refuge]) -> None:
    pairs = balance.hedge(stragglers, refuges, Options(), most=3)
    assert len(pairs) <= 3
    by_handle = {item.handle: item for item in stragglers}
    by_name = {item.worker: item for item in refuges}
    taken = Counter(worker for _, worker in pairs)
    assert all(by_name[worker].room >= n for worker, n in taken.items())
    for handle, worker in pairs:
        item, refuge = by_handle[handle], by_name[worker]
        assert item.worker != worker
        assert item.moved < 4
        assert refuge.version >= item.version
        assert item.remaining * (item.token_s - refuge.token_s) > item.length * Options().prefill_s


@settings(deadline=None)
@given(st.integers(0, 2))
def test_an_event_costs_the_same_in_a_large_fleet(seed: int) -> None:
    """A thousand workers with a hundred responses each: counted in calls of the step time, not in seconds."""
    calls = 0

    def counted(kind: str, batch: float, context: float) -> float:
        nonlocal calls
        calls += 1
        return steps(kind, batch, context)

    balancer = Balancer(counted)
    for n in range(1000):
        balancer.update(
            Load(worker=f"w{n}", kind="slow", running=100 + (n + seed) % 7, pending=0, slots=128, context=2000)
        )
    balancer.moves(remaining=2000, most=1_000_000)
    calls, began = 0, time.perf_counter()
    balancer.update(Load(worker="w5", kind="slow", running=3, pending=0, slots=128, context=2000))
    balancer.moves(remaining=2000)
    assert calls < 500
    assert time.perf_counter() - began < 5
