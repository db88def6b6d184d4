"""Names of other tools mean our fields, and no field is set twice in silence."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest.jobs import aliases
from rlharvest.jobs.aliases import ALIASES
from rlharvest.jobs.model import JobSpec, parse


def put(values: dict[str, Any], path: str, value: Any) -> dict[str, Any]:
    *parents, last = path.split(".")
    block = values
    for parent in parents:
        block = block.setdefault(parent, {})
    block[last] = value
    return values


@given(st.sampled_from(sorted(ALIASES)), st.booleans(), st.integers())
def test_an_alias_is_taken_nested_and_dotted(alias: str, dotted: bool, value: int) -> None:
    """Both spellings give our field and leave nothing of the foreign one."""
    given_ = {alias: value} if dotted else put({}, alias, value)
    before = copy.deepcopy(given_)
    assert aliases.apply(given_) == put({}, ALIASES[alias], value)
    assert given_ == before, "the caller's mapping was changed"


@given(st.sampled_from(sorted(ALIASES)), st.integers(), st.integers())
def test_a_field_with_two_names_and_two_values_is_refused(alias: str, one: int, two: int) -> None:
    values = put({alias: one}, ALIASES[alias], two)
    if one == two:
        assert aliases.apply(values) == put({}, ALIASES[alias], one)
        return
    with pytest.raises(InvalidField, match="given twice") as caught:
        aliases.apply(values)
    assert caught.value.field == ALIASES[alias]
    assert alias in str(caught.value)


def test_every_alias_leads_to_a_field_of_the_job() -> None:
    for alias, ours in ALIASES.items():
        block: Any = JobSpec
        *parents, last = ours.split(".")
        for parent in parents:
            block = block.model_fields[parent].annotation
        assert last in block.model_fields, alias


def test_our_own_names_may_be_dotted() -> None:
    assert aliases.apply({"sampling.temperature": 0.5, "sampling": {"seed": 3}}) == {
        "sampling": {"temperature": 0.5, "seed": 3}
    }


def test_a_dotted_name_below_something_that_is_no_mapping_is_refused() -> None:
    with pytest.raises(InvalidField) as caught:
        aliases.apply({"sampling": 3, "sampling.temperature": 0.5})
    assert "Write `sampling:`" in caught.value.fix


def test_a_job_of_verl_is_a_job() -> None:
    spec = parse(
        {
            "actor_rollout_ref": {
                "model": {"path": "m"},
                "rollout": {"n": 4, "temperature": 0.7},
                "actor": {"optim": {"lr": 2e-6}, "clip_ratio_high": 0.28},
            },
            "data": {"train_files": "d.parquet", "train_batch_size": 16, "max_response_length": 64},
            "trainer.total_training_steps": 5,
            "rewards": [{"builtin": "numeric"}],
        }
    )
    assert spec.model == "m"
    assert spec.dataset.path == "d.parquet"
    assert (spec.sampling.num_generations, spec.sampling.temperature) == (4, 0.7)
    assert (spec.algorithm.prompts_per_step, spec.algorithm.learning_rate) == (16, 2e-6)
    assert (spec.algorithm.epsilon, spec.algorithm.epsilon_high) == (0.2, 0.28)
    assert spec.limits.max_steps == 5


LEAVES = st.integers() | st.text(max_size=5)


@given(st.recursive(LEAVES, lambda inner: st.dictionaries(st.text(max_size=6), inner), max_leaves=8))
def test_other_values_pass_unchanged(value: Any) -> None:
    """What is no alias and has no dot is left for the model to judge."""
    if not isinstance(value, dict) or any("." in str(key) or key in ALIASES for key in value):
        return
    assert aliases.apply(value) == value
