"""Inventories and models that cannot be planned for are refused with the field, the value and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import BaseModel
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import parse as parse_job
from rlharvest.planner import inventory, solve, transfer, workload

ROOT = Path(__file__).parents[3]
MACHINE = {"name": "a", "gpu": "H100", "gpus": 8, "usd_per_hour": "20"}
CONFIG = {
    "hidden_size": 5120,
    "num_hidden_layers": 48,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 13824,
    "vocab_size": 152064,
}
JOB = {"model": "m", "dataset": {"path": "x.jsonl"}, "rewards": [{"builtin": "exact_match"}]}


@pytest.mark.parametrize(
    ("values", "field", "says"),
    [
        ([], "inventory", "at the top level"),
        ({"machine": []}, "inventory", "did you mean 'machines'"),
        ({"machines": []}, "machines", "docs/planner.md"),
        ({"machines": [{**MACHINE, "gpus": 6}]}, "machines.0", "power of two"),
        ({"machines": [{**MACHINE, "gpu": "K80"}]}, "inventory", "hbm_gb"),
        ({"machines": [MACHINE, MACHINE]}, "inventory", "there twice"),
        ({"machines": [{**MACHINE, "market": "stolen"}]}, "machines.0.market", "docs/planner.md"),
        ({"machines": [{**MACHINE, "count": 65_536}]}, "inventory", "the limit is 65536"),
        ({"machines": [{**MACHINE, "usd_per_hours": 3}]}, "machines.0", "did you mean 'usd_per_hour'"),
    ],
)
def test_a_wrong_inventory_is_named(values: Any, field: str, says: str) -> None:
    with pytest.raises(InvalidField) as error:
        inventory.parse(values)
    assert error.value.field == field
    assert says in str(error.value)


def test_a_gpu_can_be_described_and_a_known_one_changed() -> None:
    stock = inventory.parse(
        {
            "machines": [{**MACHINE, "gpu": "K80"}, {**MACHINE, "name": "b"}],
            "gpus": {
                "K80": {"tflops": 4, "hbm_tb_per_s": 0.24, "hbm_gb": 12},
                "H100": {"tflops": 800, "hbm_tb_per_s": 3, "hbm_gb": 80},
            },
        }
    )
    assert [stock.gpu(machine).tflops for machine in stock.machines] == [4, 800]
    assert stock.total == 16


def test_the_shape_of_a_dense_model_is_that_of_its_configuration() -> None:
    shape = workload.shape(CONFIG)
    assert shape.parameters == pytest.approx(14.77e9, rel=0.001)
    assert shape.kv_bytes == 48 * 8 * 128 * 2 * 2
    assert shape.weight_bytes == 2 * shape.parameters
    assert workload.shape({"text_config": CONFIG}) == shape
    assert workload.shape(CONFIG, bytes_per_weight=4).kv_bytes == 2 * shape.kv_bytes


def test_an_expert_that_is_not_chosen_costs_memory_and_no_time() -> None:
    experts = {**CONFIG, "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    shape = workload.shape(experts)
    assert shape.active < shape.parameters / 5


@pytest.mark.parametrize("value", [None, 0, "12", True, -3])
def test_a_configuration_without_its_numbers_is_named(value: Any) -> None:
    with pytest.raises(InvalidField, match=r"config\.hidden_size"):
        workload.shape({**CONFIG, "hidden_size": value})


@settings(deadline=None)
@given(st.integers(16, 100_000), st.floats(0.01, 1.0))
def test_contexts_and_lengths_stay_within_the_limit(limit: int, share: float) -> None:
    job = parse_job({**JOB, "sampling": {"max_completion_length": limit, "num_generations": 2}})
    shape = workload.shape(CONFIG)
    guessed = workload.workload(job, shape)
    assert 0 < guessed.response_tokens < limit
    given_mean = workload.workload(job, shape, prompt_tokens=10, response_tokens=limit * share)
    assert given_mean.response_tokens == limit * share
    for work in (guessed, given_mean):
        assert work.prompt_tokens < work.context_tokens <= work.prompt_tokens + limit / 2 + 1e-6
        assert work.longest >= work.prompt_tokens + limit


def test_a_mean_above_the_limit_is_refused() -> None:
    with pytest.raises(InvalidField, match="response tokens"):
        workload.workload(parse_job(JOB), workload.shape(CONFIG), response_tokens=1e6)


def test_synchronous_training_and_a_reference_model_are_seen() -> None:
    shape = workload.shape(CONFIG)
    synchronous = workload.workload(parse_job({**JOB, "staleness": {"max_staleness": 0}}), shape)
    assert not synchronous.overlaps
    assert synchronous.inflight == synchronous.responses
    with_reference = workload.workload(parse_job({**JOB, "algorithm": {"beta": 0.1}}), shape)
    assert with_reference.forwards == synchronous.forwards + 1


def test_a_delta_is_a_small_part_and_senders_share_the_load() -> None:
    full = transfer.update(28e9, mode="full", senders=1, copies=[3, 2], links=[5e9, 1.5e9])
    assert full.pull_s == pytest.approx(3 * 28 / 5 + 2 * 28 / 1.5)
    delta = transfer.update(28e9, mode="delta", senders=1, copies=[3, 2], links=[5e9, 1.5e9])
    assert delta.pull_s == pytest.approx(full.pull_s * transfer.DELTA_SHARE)
    many = transfer.update(28e9, mode="full", senders=100, copies=[3, 2], links=[5e9, 1.5e9])
    assert many.pull_s == pytest.approx(28 / 1.5), "a machine cannot get it faster than its own link"


@pytest.mark.parametrize(
    ("machines", "says"),
    [
        ([{**MACHINE, "market": "spot"}], "all are spot"),
        ([{**MACHINE, "gpu": "L40S", "gpus": 1}], "none holds the weights"),
        ([{**MACHINE, "gpus": 2}], "training does not fit"),
        ([{**MACHINE, "count": 2}, {**MACHINE, "name": "b", "gpus": 1, "gpu": "L40S"}], None),
    ],
)
def test_an_inventory_that_cannot_do_it_is_explained(machines: list[dict[str, Any]], says: str | None) -> None:
    shape = workload.shape(CONFIG, bytes_per_weight=4)
    work = workload.workload(parse_job({**JOB, "sampling": {"max_completion_length": 4096}}), shape)
    stock = inventory.parse({"machines": machines})
    if says is None:
        assert solve.solve(stock, work).best.rollout
        return
    with pytest.raises(InvalidField, match=says) as error:
        solve.solve(stock, work)
    assert error.value.field == "machines"
    assert error.value.fix


def test_nothing_left_for_rollout_is_explained() -> None:
    small = {**CONFIG, "hidden_size": 256, "num_hidden_layers": 2, "intermediate_size": 512, "vocab_size": 1000}
    work = workload.workload(parse_job(JOB), workload.shape(small))
    stock = inventory.parse({"machines": [{**MACHINE, "gpus": 1}]})
    with pytest.raises(InvalidField, match="1 of 1 a, and what is left cannot hold an engine"):
        solve.solve(stock, work)


@pytest.mark.parametrize("path", sorted((ROOT / "examples" / "inventories").glob("*.yaml")), ids=lambda path: path.stem)
def test_an_example_is_an_inventory(path: Path) -> None:
    assert inventory.parse(yaml.safe_load(path.read_text())).total


@pytest.mark.parametrize(
    "block", [inventory.Inventory, inventory.Machine, inventory.Gpu, inventory.Links], ids=lambda block: block.__name__
)
def test_every_field_is_in_the_page(block: type[BaseModel]) -> None:
    page = (ROOT / "docs" / "planner.md").read_text()
    for name in block.model_fields:
        assert f"| `{name}` |" in page
    for name in inventory.KNOWN:
        assert f"`{name}`" in page
