"""The arithmetic example: its data is the same on every machine, its statistics are right, its job is valid."""

from __future__ import annotations

import dataclasses
import hashlib
import importlib.util
import json
import math
import statistics
import sys
from pathlib import Path
from types import ModuleType

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.jobs.model import parse

EXAMPLES = Path(__file__).parents[3] / "examples"


def load(name: str) -> ModuleType:
    """Import a script of the example."""
    spec = importlib.util.spec_from_file_location(f"arithmetic_{name}", EXAMPLES / "arithmetic" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


evaluate, model, rewards = load("evaluate"), load("model"), load("rewards")


def test_the_data_is_reproducible() -> None:
    train, heldout = model.problems(model.Settings())
    again = model.problems(model.Settings())
    assert (train, heldout) == again
    digest = hashlib.sha256(json.dumps([train, heldout]).encode()).hexdigest()[:16]
    assert digest == "1ab91a442613c725"
    assert model.problems(dataclasses.replace(model.Settings(), seed=8)) != again


def test_held_out_problems_are_never_trained_on() -> None:
    train, heldout = model.problems(model.Settings())
    assert (len(train), len(heldout)) == (9744, 256)
    assert not {row["question"] for row in train} & {row["question"] for row in heldout}


def test_answers_are_reversed_sums_and_the_careless_teacher_forgets_every_carry() -> None:
    for row in model.problems(model.Settings())[1]:
        first, second = map(int, row["question"].rstrip("=").split("+"))
        assert int(row["answer"][::-1]) == first + second
        carries = first % 10 + second % 10 > 9 or first + second > 99
        assert (model.careless(row["question"]) == row["answer"]) is not carries
    assert model.careless("58+67=") == "510"


def test_every_setting_changes_the_name_in_the_cache() -> None:
    base = model.Settings()
    names = {base.digest()}
    for field in dataclasses.fields(base):
        names.add(dataclasses.replace(base, **{field.name: getattr(base, field.name) + 1}).digest())
    assert len(names) == 1 + len(dataclasses.fields(base))


@settings(deadline=None)
@given(pairs=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=50))
def test_the_gain_is_that_of_paired_differences(pairs: list[tuple[bool, bool]]) -> None:
    gain = evaluate.paired_gain([old for old, _ in pairs], [new for _, new in pairs])
    differences = [int(new) - int(old) for old, new in pairs]
    assert gain.mean == pytest.approx(statistics.fmean(differences))
    assert gain.standard_error == pytest.approx(statistics.stdev(differences) / math.sqrt(len(pairs)))


def test_a_gain_without_variance_is_beyond_luck_or_nothing() -> None:
    assert evaluate.paired_gain([False, False], [True, True]).standard_errors == math.inf
    assert evaluate.paired_gain([True, False], [True, False]).standard_errors == 0.0
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        evaluate.paired_gain([True, False], [True])


def test_the_reward_is_one_for_the_right_answer_alone() -> None:
    assert rewards.compute_score("", " 910\n", "910") == 1.0
    assert rewards.compute_score("", "91", "910") == 0.0


@pytest.mark.parametrize("name", ["arithmetic/job.yaml", "smollm2/job.yaml", "smollm2/job-gpu.yaml"])
def test_the_jobs_of_the_examples_are_valid(name: str) -> None:
    spec = parse(yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8")))
    assert spec.limits.max_steps >= 5
