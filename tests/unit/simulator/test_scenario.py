"""A scenario says what is wrong with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlharvest.errors import InvalidField
from rlharvest.simulator import scenario
from rlharvest.simulator.scenario import Workload
from rlharvest.simulator.workload import Lengths

EXAMPLES = Path(__file__).parents[3] / "examples" / "scenarios"


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"stepz": 3}, "steps"),
        ({"steps": 0}, "steps"),
        ({"market": {"usd_per_hour": "1", "workers": {"device": "gpu", "gpu": 2}}}, "gpus"),
        ({"market": {"usd_per_hour": "1", "workers": {"device": "tpu"}}}, "tpu"),
        ({"strategies": ["rlharvest", "rlharvest"]}, "each one once"),
        ({"model": {"parameters_b": 400, "kv_bytes_per_token": 1000}}, "use more GPUs"),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], change: dict[str, Any], names: str) -> None:
    with pytest.raises(InvalidField, match=names):
        scenario.parse(values | change)


def test_a_trace_is_looked_for_beside_the_scenario_and_then_where_traces_are(
    values: dict[str, Any], tmp_path: Path
) -> None:
    values["market"]["trace"] = "a/t.csv"
    parsed = scenario.parse(values)
    beside, traces = tmp_path / "scenarios", tmp_path / "traces"
    assert scenario.within(parsed, beside).market.trace == str(beside / "a" / "t.csv")
    assert scenario.within(parsed, beside, traces).market.trace == str(traces / "a" / "t.csv")
    (beside / "a").mkdir(parents=True)
    (beside / "a" / "t.csv").touch()
    assert scenario.within(parsed, beside, traces).market.trace == str(beside / "a" / "t.csv")


def test_lengths_depend_on_seed_and_group_alone() -> None:
    spec = Workload(prompts=100, num_generations=8, median_tokens=2000, max_tokens=14_000)
    first, second, other = Lengths(spec, 1), Lengths(spec, 1), Lengths(spec, 2)
    assert [first.draw(n) for n in range(50)] == [second.draw(n) for n in reversed(range(50))][::-1]
    assert first.draw(0) != other.draw(0)
    assert sorted(first.prompt_of(n) for n in range(100)) == list(range(100)), "an epoch has each prompt once"
    assert sorted(first.prompt_of(n) for n in range(100, 200)) == list(range(100))


def test_lengths_have_the_shape_that_is_asked_for() -> None:
    spec = Workload(prompts=10**6, num_generations=1, median_tokens=1000, max_tokens=10**7)
    lengths = sorted(one for n in range(4000) for one in Lengths(spec, 5).draw(n))
    assert lengths[2000] == pytest.approx(1000, rel=0.1)
    assert lengths[3960] / lengths[2000] == pytest.approx(9.0, rel=0.3), "p99 over median, of a deviation of 0.94"
    capped = spec.model_copy(update={"max_tokens": 1500})
    assert max(one for n in range(400) for one in Lengths(capped, 5).draw(n)) == 1500
