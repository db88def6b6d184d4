"""Every wrong job is refused with the field, the value and what to do."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import JobSpec, parse

GOOD: dict[str, Any] = {
    "model": "models/tiny",
    "dataset": {"path": "train.jsonl"},
    "rewards": [{"builtin": "exact_match"}],
}


def job(**changes: Any) -> dict[str, Any]:
    return {**copy.deepcopy(GOOD), **changes}


def refused(values: Any) -> InvalidField:
    with pytest.raises(InvalidField) as caught:
        parse(values)
    error = caught.value
    assert error.fix, "an error without a fix"
    assert error.field in str(error)
    return error


def test_a_small_job_gets_its_defaults() -> None:
    spec = parse(GOOD)
    assert spec.sampling.num_generations == 8
    assert spec.staleness.max_staleness == 1
    assert not spec.deterministic
    assert not spec.batch_invariant
    assert spec.sampling_seed == spec.seed == 0


def test_staleness_zero_means_deterministic_unless_said_otherwise() -> None:
    assert parse(job(staleness={"max_staleness": 0})).deterministic
    assert parse(job(staleness={"max_staleness": 0})).batch_invariant
    assert not parse(job(staleness={"max_staleness": 0}, algorithm={"deterministic": False})).deterministic
    assert parse(job(algorithm={"deterministic": True}, rollout={"batch_invariant": True})).batch_invariant


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"model": ""}, "model"),
        ({"model": 7}, "model"),
        ({"dataset": {"path": ""}}, "dataset.path"),
        ({"dataset": {}}, "dataset.path"),
        ({"dataset": "train.jsonl"}, "dataset"),
        ({"dataset": {"path": "d", "format": "csv"}}, "dataset.format"),
        ({"dataset": {"path": "d", "size": 0}}, "dataset.size"),
        ({"rewards": []}, "rewards"),
        ({"rewards": [{"builtin": "exact_match", "timeout_s": 0}]}, "rewards.0.timeout_s"),
        ({"rewards": [{"builtin": "exact_match", "weight": float("nan")}]}, "rewards.0.weight"),
        ({"sampling": {"num_generations": 0}}, "sampling.num_generations"),
        ({"sampling": {"num_generations": 2.5}}, "sampling.num_generations"),
        ({"sampling": {"max_completion_length": -1}}, "sampling.max_completion_length"),
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"temperature": float("inf")}}, "sampling.temperature"),
        ({"sampling": {"temperature": "hot"}}, "sampling.temperature"),
        ({"sampling": {"top_p": 0}}, "sampling.top_p"),
        ({"sampling": {"seed": -1}}, "sampling.seed"),
        ({"sampling": {"seed": 2**63}}, "sampling.seed"),
        ({"algorithm": {"name": "ppo"}}, "algorithm.name"),
        ({"algorithm": {"learning_rate": 0}}, "algorithm.learning_rate"),
        ({"algorithm": {"learning_rate": float("nan")}}, "algorithm.learning_rate"),
        ({"algorithm": {"epsilon": 1.0}}, "algorithm.epsilon"),
        ({"algorithm": {"max_grad_norm": 0}}, "algorithm.max_grad_norm"),
        ({"algorithm": {"dtype": "float64"}}, "algorithm.dtype"),
        ({"staleness": {"max_staleness": -1}}, "staleness.max_staleness"),
        ({"staleness": {"on_stale": "ignore"}}, "staleness.on_stale"),
        ({"rollout": {"engine": "sglang"}}, "rollout.engine"),
        ({"rollout": {"progress_deadline_s": 0}}, "rollout.progress_deadline_s"),
        ({"weights": {"keep_versions": 1}}, "weights.keep_versions"),
        ({"checkpoint": {"every_steps": 0}}, "checkpoint.every_steps"),
        ({"limits": {"max_steps": 0}}, "limits.max_steps"),
        ({"seed": 1.5}, "seed"),
        ({"metadata": {"a": 1}}, "metadata.a"),
    ],
)
def test_a_wrong_value_is_named_with_its_field(changes: dict[str, Any], field: str) -> None:
    error = refused(job(**changes))
    assert error.field == field
    value: Any = job(**changes)
    for part in field.split("."):
        value = value[int(part)] if isinstance(value, list) else value.get(part, value)
    assert repr(error.value) == repr(value)


@pytest.mark.parametrize(
    ("changes", "field", "says"),
    [
        ({"rewards": [{}]}, "rewards.0", "set either `builtin`"),
        ({"rewards": [{"builtin": "regex"}]}, "rewards.0", "pattern"),
        ({"rewards": [{"builtin": "numeric", "path": "r.py"}]}, "rewards.0", "set either `builtin`"),
        ({"rewards": [{"path": "r.py", "style": "builtin"}]}, "rewards.0", "leave style at auto"),
        ({"sampling": {"top_p": 0.9}}, "sampling", "Use top_p: 1.0"),
        ({"sampling": {"top_k": 50}}, "sampling", "top_k: 0"),
        ({"sampling": {"temperature": 0}}, "sampling", "Use temperature: 1.0"),
        ({"sampling": {"stop": ["a", ""]}}, "sampling", "Remove it"),
        ({"sampling": {"num_generations": 1}}, "job", "Use 2 or more, or algorithm.scale_rewards: none"),
    ],
)
def test_values_that_do_not_fit_together_say_what_to_write_instead(
    changes: dict[str, Any], field: str, says: str
) -> None:
    error = refused(job(**changes))
    assert error.field == field
    assert says in str(error)


@pytest.mark.parametrize(
    ("values", "field", "near"),
    [
        (job(modle="x"), "job", "'model'"),
        (job(sampling={"max_completion_lenght": 5}), "sampling", "'max_completion_length'"),
        (job(algorithm={"learning_rat": 1e-3}), "algorithm", "'learning_rate'"),
        (job(staleness={"max_stalenes": 1}), "staleness", "'max_staleness'"),
        (job(limits={"max_step": 1}), "limits", "'max_steps'"),
        (job(rewards=[{"builtins": "exact_match"}]), "rewards.0", "'builtin'"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(values: dict[str, Any], field: str, near: str) -> None:
    error = refused(values)
    assert error.field == field
    assert f"did you mean {near}?" in error.problem


def test_an_unknown_key_that_is_like_none_lists_the_known() -> None:
    error = refused(job(checkpoint={"xyzzy": 1}))
    assert "known keys: every_steps, keep" in error.problem


@pytest.mark.parametrize("values", [None, [], "job", 3, [GOOD]])
def test_what_is_no_mapping_is_refused(values: Any) -> None:
    assert refused(values).field == "job"


@pytest.mark.parametrize("text", ["1e-6", "1E-6", "0.000001"])
def test_a_float_in_yaml_1_1_notation_is_read(text: str) -> None:
    """YAML 1.1 gives `1e-6`, without a dot, as a string; it means the number."""
    assert parse(job(algorithm={"learning_rate": text})).algorithm.learning_rate == 1e-6


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.floats(),
    st.text(max_size=8),
    st.lists(st.integers(), max_size=2),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def paths(model: type[BaseModel], prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Every field of a job, as a path of keys."""
    found = []
    for name, info in model.model_fields.items():
        kind = info.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            found += paths(kind, (*prefix, name))
        found.append((*prefix, name))
    return found


@given(st.sampled_from(paths(JobSpec)), LEAVES)
def test_whatever_stands_in_a_field_the_job_is_taken_or_refused_by_name(path: tuple[str, ...], value: Any) -> None:
    """Never another exception, and never an error about another section."""
    values: dict[str, Any] = copy.deepcopy(GOOD)
    block = values
    for key in path[:-1]:
        block = block.setdefault(key, {})
    block[path[-1]] = value
    try:
        spec = parse(values)
    except InvalidField as error:
        named, fix = error.field.split(".")[0], error.fix
    else:
        assert parse(json.loads(spec.model_dump_json())) == spec
        return
    assert named in ("job", path[0])
    assert fix


def test_equal_jobs_have_equal_digests_and_others_do_not() -> None:
    """Order of keys and defaults that are written out play no part."""
    one = parse(GOOD)
    same = parse({key: GOOD[key] for key in reversed(GOOD)} | {"sampling": {"num_generations": 8}})
    other = parse(job(seed=1))
    assert one.digest() == same.digest()
    assert one.digest() != other.digest()
    assert len(one.digest()) == 64
