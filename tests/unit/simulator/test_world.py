"""Whole runs: nothing is lost, nothing doubled, everything billed, and the same seed gives the same run."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlharvest.money import figures
from rlharvest.simulator import market, scenario
from rlharvest.simulator.outcome import Outcome, compare
from rlharvest.simulator.scenario import Generated, Scenario
from rlharvest.simulator.strategy import NAMED, Strategy
from rlharvest.simulator.workload import Lengths
from rlharvest.simulator.world import World, run

FEW = settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def check(world: World, outcome: Outcome) -> None:
    """What holds for every run that did all its steps."""
    spec = world.scenario
    assert outcome.finished
    lengths = Lengths(spec.workload, spec.seed)
    per_step = spec.workload.prompts_per_step
    prompts = per_step * spec.workload.num_generations * spec.workload.prompt_tokens
    for step in outcome.steps:
        groups = range(step.step * per_step, (step.step + 1) * per_step)
        assert step.tokens == prompts + sum(sum(lengths.draw(group)) for group in groups), "the batch of its rank"
        assert step.seconds >= step.train_s + step.seeded_s + step.trainer_idle_s - 1e-6
    assert not world.rollout.live
    assert not world.rollout.groups
    for before, after in pairwise(outcome.steps):
        assert after.start_s == before.end_s
    assert outcome.spent == tuple(sorted(outcome.spent))
    reserved = Fraction(spec.reserved.usd_per_node_hour) * spec.reserved.nodes
    assert float(outcome.reserved.total.dollars) == pytest.approx(float(reserved) * outcome.seconds / 3600, rel=1e-3)
    by_worker: dict[str, float] = {}
    for who, _, start, end in sorted(outcome.stretches, key=lambda item: (item.who, item.start_s)):
        assert start >= by_worker.get(who, 0.0) - 1e-9, "stretches overlap"
        by_worker[who] = end


def play(spec: Scenario, strategy: Strategy) -> Outcome:
    world = World(spec, strategy)
    outcome = world.play()
    check(world, outcome)
    return outcome


@pytest.mark.parametrize("name", NAMED)
@pytest.mark.parametrize("staleness", [0, 2])
def test_every_strategy_trains_every_response_once(values: dict[str, Any], name: Any, staleness: int) -> None:
    spec = scenario.parse(values | {"max_staleness": staleness})
    outcome = play(spec, NAMED[name])
    assert (outcome.spot.total.ticks > 0) == NAMED[name].spot


@FEW
@given(
    seed=st.integers(0, 1000),
    staleness=st.integers(0, 3),
    up=st.floats(0.5, 20),
    down=st.floats(0, 10),
    storms=st.floats(0, 2000),
    name=st.sampled_from(["rlboost", "rlharvest"]),
    keep=st.booleans(),
    seeding=st.booleans(),
)
def test_any_market_is_survived(
    values: dict[str, Any],
    seed: int,
    staleness: int,
    up: float,
    down: float,
    storms: float,
    name: Any,
    keep: bool,
    seeding: bool,
) -> None:
    spec = scenario.parse(values | {"max_staleness": staleness, "seed": seed, "steps": 3})
    made_up = Generated(places=4, hours=0.5, up_minutes=up, down_minutes=down, storms_per_day=storms)
    spec = spec.model_copy(update={"market": spec.market.model_copy(update={"generated": made_up})})
    outcome = play(spec, replace(NAMED[name], keep_tokens=keep, seeding=seeding))
    if not outcome.lost_instances:
        assert outcome.orphans == 0


def test_the_same_seed_gives_the_same_run(values: dict[str, Any]) -> None:
    spec = scenario.parse(values)
    first, second = (World(spec, NAMED["rlharvest"]).play() for _ in range(2))
    assert first.json() == second.json()
    assert first == second
    other = World(spec.model_copy(update={"seed": 4}), NAMED["rlharvest"]).play()
    assert other.json() != first.json()


def test_without_preemptible_workers_every_strategy_still_trains(values: dict[str, Any]) -> None:
    spec = scenario.parse(values)
    none = spec.model_copy(update={"market": spec.market.model_copy(update={"fixed": 0})})
    for name in ("rlboost", "rlharvest"):
        assert play(none, NAMED[name]).spot.total.ticks == 0


def test_the_cost_identity_holds(values: dict[str, Any]) -> None:
    """Tokens a dollar against reserved alone = speedup / (1 + n p / P), exactly."""
    spec = scenario.parse(values)
    fixed = spec.model_copy(update={"market": spec.market.model_copy(update={"fixed": 3, "most": 3})})
    alone, fleet = World(fixed, NAMED["colocated"]).play(), World(fixed, NAMED["rlharvest"]).play()
    assert alone.tokens == fleet.tokens
    efficiency = (Fraction(alone.total.ticks) / alone.tokens) / (Fraction(fleet.total.ticks) / fleet.tokens)
    speedup = Fraction(alone.reserved.total.ticks, fleet.reserved.total.ticks)
    assert efficiency == figures.efficiency(speedup=speedup, reserved=fleet.reserved.total, spot=fleet.spot.total)


def test_keeping_tokens_never_generates_more_again_than_starting_anew(values: dict[str, Any]) -> None:
    values["market"]["generated"] = {"places": 4, "hours": 1, "up_minutes": 1, "down_minutes": 0.1}
    values["market"]["boot_s"] = 2
    spec = scenario.parse(values)
    kept = play(spec, NAMED["rlharvest"])
    anew = play(spec, replace(NAMED["rlharvest"], keep_tokens=False))
    assert kept.lost_instances > 0
    assert kept.orphans > 0
    assert kept.regenerated_tokens <= kept.orphans * spec.coordinator.flush_tokens
    assert anew.regenerated_tokens > kept.regenerated_tokens


def test_outcomes_are_compared_and_are_json(values: dict[str, Any]) -> None:
    spec = scenario.parse(values | {"strategies": ["colocated", "rlharvest"], "steps": 2})
    outcomes = run(spec, trace=market.of(spec.market, spec.seed))
    head, rows = compare(outcomes)
    assert [len(row) for row in rows] == [len(head)] * 2
    assert rows[0][head.index("x")] == "1.00"
    assert json.loads(outcomes[1].json())["steps"][1]["usd"] > 0


def test_a_run_that_takes_too_long_is_ended_and_says_so(values: dict[str, Any]) -> None:
    outcome = World(scenario.parse(values | {"max_hours": 0.01}), NAMED["colocated"]).play()
    assert not outcome.finished
    assert "(not done)" in compare([outcome])[1][0][0]
