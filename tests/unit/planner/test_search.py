"""The planner finds the best plan there is: compared with trying everything on small inventories."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest.planner import cost, inventory, partition, rollout, solve, training
from rlharvest.planner.rollout import Configuration, Menu
from rlharvest.planner.workload import Shape, Workload

Found = TypeVar("Found")

SHAPES = st.builds(
    Shape,
    parameters=st.sampled_from([0.5e9, 3e9, 8e9]),
    active=st.just(3e9),
    layers=st.sampled_from([2, 5, 24]),
    hidden=st.just(2048),
    vocabulary=st.just(32_000),
    kv_bytes=st.sampled_from([3e4, 3e5]),
    weight_bytes=st.sampled_from([1e9, 6e9, 5e10]),
)
WORK = st.builds(
    Workload,
    shape=SHAPES,
    responses=st.sampled_from([4, 32, 512]),
    prompt_tokens=st.just(200.0),
    response_tokens=st.sampled_from([100.0, 2000.0]),
    context_tokens=st.just(1500.0),
    longest=st.just(4000.0),
    inflight=st.sampled_from([4, 40, 1000]),
    slots=st.sampled_from([3, 64]),
    micro_batch_tokens=st.just(8192),
    forwards=st.integers(0, 2),
    overlaps=st.booleans(),
)
MACHINES = st.lists(
    st.fixed_dictionaries(
        {
            "gpu": st.sampled_from(["H800", "H20", "L40S"]),
            "gpus": st.sampled_from([1, 2]),
            "count": st.integers(1, 3),
            "usd_per_hour": st.sampled_from(["1.5", "12"]),
            "market": st.sampled_from(["reserved", "reserved", "spot"]),
        }
    ),
    min_size=1,
    max_size=2,
)
OPTIONS = st.builds(solve.Options, weights=st.sampled_from(["delta", "full"]), blocking=st.booleans())


def named(machines: Sequence[dict[str, Any]]) -> inventory.Inventory:
    return inventory.parse({"machines": [{"name": f"m{at}", **one} for at, one in enumerate(machines)]})


# --- rollout --------------------------------------------------------------------------------------------------------------


@st.composite
def menus(draw: st.DrawFn) -> Menu:
    kinds = [rollout.Kind(size=4, gpus=9, flops=1, bandwidth=1, hbm=1, link=1, price=draw(st.integers(0, 9)))] * 2
    rows = st.tuples(
        st.integers(0, 1), st.sampled_from([1, 2, 4]), st.sampled_from([1, 2]), st.integers(1, 8), st.floats(0.1, 100)
    )
    configurations = [
        Configuration(kind=kind, tensor=tensor, pipeline=pipeline, batch=batch, rate=rate)
        for kind, tensor, pipeline, batch, rate in draw(st.lists(rows, min_size=1, max_size=4))
    ]
    return Menu(kinds, configurations, draw(st.integers(1, 24)))


def choices(menu: Menu, gpus: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Every number of replicas of each configuration that is within the limits."""
    most = [min(gpus[one.kind] // one.gpus, menu.inflight // one.batch) for one in menu.configurations]
    for counts in itertools.product(*(range(n + 1) for n in most)):
        used = [0] * len(menu.kinds)
        for one, count in zip(menu.configurations, counts, strict=True):
            used[one.kind] += one.gpus * count
        slots = sum(one.batch * count for one, count in zip(menu.configurations, counts, strict=True))
        if slots <= menu.inflight and all(have <= limit for have, limit in zip(used, gpus, strict=True)):
            yield counts


def brute_rate(menu: Menu, gpus: Sequence[int]) -> float:
    rates = [one.rate for one in menu.configurations]
    return max(sum(rate * n for rate, n in zip(rates, counts, strict=True)) for counts in choices(menu, gpus))


@settings(max_examples=60, deadline=None)
@given(menus(), st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_no_combination_of_replicas_beats_the_program(menu: Menu, gpus: tuple[int, int]) -> None:
    rate, chosen = menu.best(gpus)
    assert rate == pytest.approx(brute_rate(menu, gpus))
    counts = dict(chosen)
    assert tuple(counts.get(one, 0) for one in menu.configurations) in set(choices(menu, gpus)) or len(
        set(menu.configurations)
    ) < len(menu.configurations)
    assert menu.bound(np.array([gpus], dtype=float))[0] >= rate * (1 - 1e-9)


@settings(max_examples=40, deadline=None)
@given(menus(), st.tuples(st.integers(1, 6), st.integers(1, 6)), st.floats(0.05, 1.0))
def test_the_cheapest_replicas_reach_the_rate(menu: Menu, gpus: tuple[int, int], share: float) -> None:
    best, _ = menu.best(gpus)
    assume(best > 0)
    rate, chosen = menu.cheapest(gpus, rate=best * share)
    assert rate >= best * share * (1 - 1e-6)

    def price(counts: Sequence[int]) -> float:
        each = zip(menu.configurations, counts, strict=True)
        return sum(count * one.gpus * (menu.kinds[one.kind].price + 1e-6) for one, count in each)

    able = [
        price(counts)
        for counts in choices(menu, gpus)
        if sum(one.rate * n for one, n in zip(menu.configurations, counts, strict=True)) >= best * share * (1 - 1e-9)
    ]
    found = sum(count * one.gpus * (menu.kinds[one.kind].price + 1e-6) for one, count in chosen)
    assert found == pytest.approx(min(able), rel=1e-5, abs=1e-5)


@settings(max_examples=25, deadline=None)
@given(WORK, MACHINES)
def test_leaving_replaceable_configurations_out_loses_nothing(work: Workload, machines: list[dict[str, Any]]) -> None:
    stock = named(machines)
    kinds = [solve.rollout_kind(stock, machine) for machine in stock.machines]
    menu = rollout.menu(kinds, work)
    whole = Menu(tuple(kinds), tuple(every(kinds, work)), work.inflight)
    gpus = [kind.gpus for kind in kinds]
    assert menu.best(gpus)[0] == pytest.approx(whole.best(gpus)[0], rel=1e-6)
    assert len(menu.configurations) <= len(whole.configurations)


def every(kinds: Sequence[rollout.Kind], work: Workload) -> Iterator[Configuration]:
    for at, kind in enumerate(kinds):
        for tensor, pipeline in itertools.product((1, 2), (1, 2, 4)):
            if tensor > kind.size or tensor * pipeline > kind.gpus or pipeline > work.shape.layers:
                continue
            room = cost.cache_sequences(
                weight_bytes=work.shape.weight_bytes,
                kv_bytes=work.shape.kv_bytes,
                context=work.context_tokens,
                gpus=tensor * pipeline,
                hbm=kind.hbm,
            )
            most = min(room, work.slots, work.inflight)
            for batch in sorted({*(1 << bits for bits in range(12) if 1 << bits <= most), *([most] if most else [])}):
                rate = rollout.rate_of(kind, work, tensor=tensor, pipeline=pipeline, batch=batch)
                yield Configuration(kind=at, tensor=tensor, pipeline=pipeline, batch=batch, rate=rate)


# --- training -------------------------------------------------------------------------------------------------------------


def kinds_of(search: solve.Search) -> list[training.Kind]:
    """The kinds as the search of training plans sees them, rebuilt from the inventory."""
    stock = search.inventory
    return [
        training.Kind(
            size=machine.gpus,
            unit=unit,
            units=0 if machine.market == "spot" else machine.count * machine.gpus // unit,
            flops=stock.gpu(machine).tflops * 1e12 * stock.gpu(machine).train_efficiency,
            hbm=stock.gpu(machine).hbm_gb * 1e9,
            link=machine.link_gb_per_s * 1e9,
        )
        for machine, unit in zip(stock.machines, search.unit, strict=True)
    ]


def all_training(search: solve.Search) -> Iterator[training.Training]:
    """Every training plan of the space, one at a time."""
    kinds, work, links = kinds_of(search), search.work, search.inventory.links
    able = [at for at, kind in enumerate(kinds) if kind.units]
    sets = [(at,) for at in able] + [pair for pair in itertools.product(able, able) if pair[0] < pair[1]]
    for used in sets:
        for parts in training._shapes(kinds, used, work.shape.layers):
            for data in range(1, work.responses + 1):
                units = [0] * len(kinds)
                for part in parts:
                    units[part.kind] = math.ceil(data * part.tensor * part.pipeline / kinds[part.kind].unit)
                if any(n > kind.units for n, kind in zip(units, kinds, strict=True)):
                    break
                seconds = training.step_s(
                    kinds,
                    parts,
                    np.array([float(data)]),
                    work,
                    same_link=links.same_gb_per_s * 1e9,
                    cross_link=links.cross_gb_per_s * 1e9,
                )[0]
                if math.isfinite(seconds):
                    yield training.Training(seconds=float(seconds), data=data, stages=parts, units=tuple(units))


@settings(max_examples=40, deadline=None)
@given(WORK, MACHINES, OPTIONS)
def test_no_plan_at_all_is_faster(work: Workload, machines: list[dict[str, Any]], options: solve.Options) -> None:
    stock = named(machines)
    result = attempt(lambda: solve.solve(stock, work, options))
    search = attempt(lambda: solve._search(stock, work, options))
    if search is None:
        assert result is None
        return
    rates: dict[tuple[int, ...], float] = {}
    fastest = {plan.units: plan.seconds for plan in search.plans}
    best, any_plan = math.inf, False
    for plan in all_training(search):
        any_plan = True
        free = search.free(plan)
        if free not in rates:
            rates[free] = search.menu.best(free)[0]
        best = min(best, search.step_s(plan, rates[free]))
        assert fastest[plan.units] <= plan.seconds * (1 + 1e-12), "a faster plan for the same machines was lost"
    if result is None:
        assert not any_plan or math.isinf(best)
        return
    assert result.exact
    assert result.best.step_s == pytest.approx(best, rel=1e-9)
    for found in filter(None, (result.best, result.second)):
        check(found, stock, work)
    if result.second is not None:
        assert result.second.step_s >= result.best.step_s
        assert result.second.training.machines != result.best.training.machines


@settings(max_examples=12, deadline=None)
@given(WORK, st.lists(MACHINES.map(lambda rows: rows[0]), min_size=2, max_size=3), st.integers(2, 4), OPTIONS)
def test_bounds_rule_out_nothing_that_is_better(
    work: Workload, machines: list[dict[str, Any]], times: int, options: solve.Options
) -> None:
    """On more machines: the best two of all training plans, each with its best rollout."""
    stock = named([{**one, "count": one["count"] * times} for one in machines])
    search = attempt(lambda: solve._search(stock, work, options))
    if search is None:
        return
    everything = sorted(search.step_s(plan, search.menu.best(search.free(plan))[0]) for plan in search.plans)
    found = [value for value, _ in solve._search(stock, work, options).best()]
    assert found == pytest.approx([value for value in everything[:2] if math.isfinite(value)], rel=1e-9)


def attempt(call: Callable[[], Found]) -> Found | None:
    """What it gives, or None where it says that there is no plan."""
    try:
        return call()
    except InvalidField:
        return None


def check(plan: Any, stock: inventory.Inventory, work: Workload) -> None:
    """A plan is one that can be carried out."""
    by_name = {machine.name: machine for machine in stock.machines}
    single = stock.total == stock.machines[0].gpus
    used = dict.fromkeys(by_name, 0)
    for name, units in plan.training.machines.items():
        assert by_name[name].market == "reserved", "a spot machine trains"
        used[name] += units * (1 if single else by_name[name].gpus)
    for replica in plan.rollout:
        assert replica.tensor_parallel <= by_name[replica.machine].gpus, "tensor parallel over machines"
        used[replica.machine] += replica.gpus
    for name, gpus in used.items():
        assert gpus <= by_name[name].gpus * by_name[name].count, "more GPUs than there are"
        assert plan.unused.get(name, 0) <= by_name[name].count - math.ceil(gpus / by_name[name].gpus)
    assert sum(stage.layers for stage in plan.training.stages) == work.shape.layers
    assert sum(replica.share for replica in plan.rollout) == pytest.approx(1)
    assert sum(replica.batch * replica.replicas for replica in plan.rollout) <= work.inflight
    assert plan.tokens_per_s == pytest.approx(work.generated / plan.step_s)
    assert plan.why


def test_spot_availability_counts_in_rate_and_price() -> None:
    """A machine that is there half of the time generates half as much, and costs half."""
    work = Workload(
        shape=Shape(
            parameters=1e9, active=1e9, layers=24, hidden=2048, vocabulary=32_000, kv_bytes=3e4, weight_bytes=2e9
        ),
        responses=4096,
        prompt_tokens=100.0,
        response_tokens=4000.0,
        context_tokens=2100.0,
        longest=8000.0,
        inflight=8192,
        slots=256,
        micro_batch_tokens=8192,
        forwards=1,
        overlaps=True,
    )

    def plan(availability: float) -> Any:
        trainer = {"gpu": "H100", "gpus": 8, "count": 1, "usd_per_hour": "80"}
        worker = {"gpu": "L40S", "gpus": 1, "count": 2, "usd_per_hour": "2", "market": "spot"}
        return solve.solve(named([trainer, {**worker, "availability": availability}]), work).best

    whole, half = plan(1.0), plan(0.5)
    assert half.rollout_s == pytest.approx(2 * whole.rollout_s)
    assert whole.usd_per_hour == pytest.approx(84)
    assert half.usd_per_hour == pytest.approx(82)


# --- partition ------------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.data())
def test_the_bisection_ends_where_training_and_rollout_cross(units: list[int], data: st.DataObject) -> None:
    worth = data.draw(st.lists(st.floats(0.1, 10), min_size=len(units), max_size=len(units)))
    queue = partition.order(units, worth)
    assert sorted(queue) == [kind for kind, n in enumerate(units) for _ in range(n)]
    assert [worth[kind] for kind in queue] == sorted((worth[kind] for kind in queue), reverse=True)

    def train_s(prefix: partition.Units) -> float:
        return 10 / sum(prefix) if sum(prefix) else math.inf

    def rollout_s(prefix: partition.Units) -> float:
        left = sum(units) - sum(prefix)
        return 7 / left if left else math.inf

    ends = partition.bisect(queue, len(units), train_s, rollout_s)
    if not queue:
        assert not ends
        return
    best = min(
        max(train_s(partition.prefix(queue, len(units), n)), rollout_s(partition.prefix(queue, len(units), n)))
        for n in range(1, len(queue) + 1)
    )
    assert min(max(train_s(end), rollout_s(end)) for end in ends) == best
