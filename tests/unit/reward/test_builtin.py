"""The built-in functions on samples as the service hands them over."""

from __future__ import annotations

import json
from typing import Any

import pytest
import reasoning_gym
from rlharvest_reward import builtin
from rlharvest_reward.fault import RewardFault


def sample(completion: str, **columns: Any) -> dict[str, Any]:
    return {
        "prompt": "q",
        "prompt_text": "The format is #### 99",
        "completion": completion,
        "completion_ids": [1],
        "columns": columns,
        "truncated": False,
        "step": 0,
    }


@pytest.mark.parametrize(
    ("completion", "truth", "expected"),
    [
        ("#### 42", "42", 1.0),
        ("####42", "42", 1.0),
        ("#### 1,234", "1234", 1.0),
        ("#### -3", "-3", 1.0),
        ("#### -3", "3", 0.0),
        ("#### $18.00", "18", 1.0),
        ("#### 42.", "42", 1.0),
        ("#### 42\n" + "x" * 500, "42", 1.0),
        ("#### 1\n#### 2", "2", 1.0),
        ("#### 1\n#### 2", "1", 0.0),
        (r"\boxed{\frac{1}{2}}", "0.5", 1.0),
        (r"\boxed{\text{(E)}}", "E", 1.0),
        (r"\boxed{\text{(E)}}", "D", 0.0),
        (r"\boxed{x^{2}+2x+1}", "(x+1)^2", 1.0),
        (r"\boxed{2\sqrt{2}}", r"\sqrt{8}", 1.0),
        (r"\boxed{\frac{\pi}{2}}", r"\pi/2", 1.0),
        (r"\boxed{\pi}", "3", 0.0),
        (r"\boxed{(1, 2)}", "(1,2)", 1.0),
        (r"\boxed{(1, 2)}", "1", 0.0),
        ("#### (1, 2)", "(1,2)", 1.0),
        ("#### 3 or 4", "3", 0.0),
        ("#### 18%", "18", 1.0),
        ("#### １８", "18", 1.0),
        ("It is 12", "12", 1.0),
        ("Reward: 10", "1", 0.0),
        ("$80,000", "80000", 1.0),
        ("no answer", "5", 0.0),
        ("", "5", 0.0),
        ("", "99", 0.0),
        ("<think>#### 5</think> #### 6", "6", 1.0),
        ("<think>it is 5</think>", "5", 0.0),
        ("#### 42", "Natalia sold 48/2 = 24.\n#### 42", 1.0),
        ("#### 42", 42, 1.0),
        ("#### 42", ["41", "42"], 1.0),
        ("#### 42", ["41", "43"], 0.0),
    ],
)
def test_numeric(completion: str, truth: Any, expected: float) -> None:
    assert builtin.prepare("numeric", {})(sample(completion, ground_truth=truth)) == expected


def test_numeric_with_a_tolerance_takes_what_is_near() -> None:
    near = sample("#### 3.14", ground_truth="3.1416")
    assert builtin.numeric(near) == 0.0
    assert builtin.numeric(near, tolerance=0.001) == 1.0


@pytest.mark.parametrize("name", ["numeric", "exact_match"])
@pytest.mark.parametrize("columns", [{"answer": "5"}, {"ground_truth": None}, {"ground_truth": []}])
def test_a_row_without_its_answer_is_a_fault_and_no_zero(name: str, columns: dict[str, Any]) -> None:
    with pytest.raises(RewardFault, match=r"needs the column 'ground_truth'.*label_key") as caught:
        builtin.BUILTINS[name](sample("5", **columns))
    assert caught.value.kind == "not_found"


def test_exact_match_ignores_only_outer_white_space_and_case_on_request() -> None:
    assert builtin.exact_match(sample(" Paris\n", ground_truth="Paris")) == 1.0
    assert builtin.exact_match(sample("paris", ground_truth="Paris")) == 0.0
    assert builtin.exact_match(sample("paris", ground_truth="Paris"), ignore_case=True) == 1.0


def test_regex_searches_the_completion() -> None:
    assert builtin.regex(sample("<answer>5</answer>"), pattern=r"<answer>\d+</answer>") == 1.0
    assert builtin.regex(sample("5"), pattern=r"<answer>\d+</answer>") == 0.0


@pytest.mark.parametrize("as_json", [True, False])
@pytest.mark.parametrize("task", ["chain_sum", "countdown"])
def test_reasoning_gym_scores_with_the_task_itself(task: str, as_json: bool) -> None:
    entry = reasoning_gym.create_dataset(task, size=1, seed=3)[0]
    columns = {"entry": json.dumps(entry) if as_json else entry, "task": task, "ground_truth": entry["answer"]}
    score = builtin.prepare("reasoning_gym", {})
    right = f"thinking\n<answer>{entry['answer']}</answer>"
    assert score(sample(right, **columns)) == 1.0
    assert score(sample(entry["answer"], **columns)) == 1.0
    assert score(sample("<answer>nonsense</answer>", **columns)) < 0.1


@pytest.mark.parametrize(
    ("columns", "params", "says"),
    [
        ({}, {}, "needs the columns 'entry' and 'task'"),
        ({"entry": {}, "task": "no_such_task"}, {}, "has no task 'no_such_task'"),
        ({"entry": {}}, {"task": "nor_this"}, "has no task 'nor_this'"),
    ],
)
def test_reasoning_gym_names_what_is_missing(columns: dict[str, Any], params: dict[str, Any], says: str) -> None:
    with pytest.raises(RewardFault, match=says):
        builtin.reasoning_gym(sample("1", **columns), **params)


@pytest.mark.parametrize(
    ("name", "params", "says"),
    [
        ("nope", {}, "no built-in reward 'nope'; there are exact_match, numeric"),
        ("exact_match", {"ignorecase": True}, r"does not know params \['ignorecase'\]; it knows \['ignore_case'\]"),
        ("regex", {"pattern": "("}, "is not a regular expression"),
    ],
)
def test_wrong_params_are_refused_before_the_first_sample(name: str, params: dict[str, Any], says: str) -> None:
    with pytest.raises(RewardFault, match=says):
        builtin.prepare(name, params)
