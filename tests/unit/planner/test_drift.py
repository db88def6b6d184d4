"""A plan is made again when what is measured is not what was planned, and not otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.planner import drift, inventory, solve
from rlharvest.planner.drift import Measured
from rlharvest.planner.workload import Shape, Workload

SHAPE = Shape(parameters=1e9, active=1e9, layers=24, hidden=2048, vocabulary=32_000, kv_bytes=1e5, weight_bytes=2e9)
WORK = Workload(
    shape=SHAPE,
    responses=4096,
    prompt_tokens=100.0,
    response_tokens=4000.0,
    context_tokens=2100.0,
    longest=8000.0,
    inflight=8192,
    slots=64,
    micro_batch_tokens=8192,
    forwards=1,
    overlaps=True,
)
STOCK = inventory.parse(
    {
        "machines": [
            {"name": "trainer", "gpu": "H100", "gpus": 8, "usd_per_hour": "80"},
            {"name": "a", "gpu": "L40S", "gpus": 1, "count": 4, "usd_per_hour": "2", "market": "spot"},
            {"name": "b", "gpu": "A100-80GB", "gpus": 1, "count": 2, "usd_per_hour": "2", "market": "spot"},
        ]
    }
)
PLAN = solve.solve(STOCK, WORK).best


def measured(train: float = 1.0, tokens: float = 1.0, steps: int = 5, **rates: float) -> Measured:
    planned = drift.planned_rates(PLAN)
    return Measured(
        steps=steps,
        train_s=PLAN.train_s * train,
        response_tokens=4000.0 * tokens,
        tokens_per_s={name: planned[name] * factor for name, factor in rates.items()},
    )


@settings(deadline=None)
@given(st.floats(0.84, 1.19), st.floats(0.84, 1.19), st.floats(0.84, 1.19))
def test_what_is_nearly_as_planned_is_no_reason(train: float, tokens: float, rate: float) -> None:
    assert drift.due(PLAN, measured(train, tokens, a=rate, b=1.0), response_tokens=4000.0) is None


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"train": 1.3}, "training takes"),
        ({"tokens": 2.0}, "responses have 8,000.0 tokens where 4,000.0"),
        ({"a": 0.5, "b": 0.7}, "a makes"),
        ({"b": 1.5}, "b makes"),
    ],
)
def test_the_greatest_difference_is_the_reason(values: dict[str, Any], says: str) -> None:
    reason = drift.due(PLAN, measured(**values), response_tokens=4000.0)
    assert reason is not None
    assert reason.startswith(says)
    assert drift.due(PLAN, measured(steps=2, **values), response_tokens=4000.0) is None, "too few steps to say"


def test_what_was_not_measured_is_no_reason_and_changes_nothing() -> None:
    assert drift.due(PLAN, Measured(steps=9), response_tokens=4000.0) is None
    assert drift.corrected(STOCK, PLAN, Measured(steps=9)) == STOCK
    assert drift.corrected(STOCK, PLAN, measured(a=1.0, b=1.0)) == STOCK


@settings(deadline=None)
@given(st.floats(0.01, 3.0), st.floats(0.1, 1.5))
def test_corrected_efficiencies_are_shares(train: float, rate: float) -> None:
    stock = drift.corrected(STOCK, PLAN, measured(train, a=rate))
    for machine in stock.machines:
        gpu = stock.gpu(machine)
        assert 0 < gpu.train_efficiency <= 1
        assert 0 < gpu.decode_efficiency <= 1
    assert stock.gpu(stock.machines[2]) == STOCK.gpu(STOCK.machines[2]), "what was not measured stays"


def test_a_plan_of_the_corrected_inventory_foretells_what_was_measured() -> None:
    """Workers of one kind at half the rate, training a fifth slower: the next plan knows."""
    found = measured(1.2, a=0.5, b=1.0)
    stock = drift.corrected(STOCK, PLAN, found)
    again = solve.solve(stock, WORK).best
    assert again.train_s == pytest.approx(PLAN.train_s * 1.2, rel=0.05)
    assert drift.planned_rates(again)["a"] == pytest.approx(found.tokens_per_s["a"], rel=0.1)
    assert drift.due(again, found, response_tokens=4000.0) is None
