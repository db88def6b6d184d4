"""Reward files are found, parsed and digested, never run."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import Reward
from rlharvest_coordinator.data import reward_files

FILE = """
import os
from math import sqrt as root
raise SystemExit("this must never run")
def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0
async def slowly(prompts, completions, **columns): return [1.0]
alias = compute_score
class Inner:
    def hidden(self): ...
"""


def check(root: Path, *rewards: Reward, has_truth: bool = True) -> str:
    return reward_files.check(rewards, roots=[root], has_truth=has_truth, columns=["a", "b"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "rewards.py").write_text(FILE)
    return tmp_path


@pytest.mark.parametrize("name", ["compute_score", "slowly", "alias", "root"])
def test_functions_of_the_top_level_are_found_without_running_the_file(root: Path, name: str) -> None:
    assert len(check(root, Reward(path="rewards.py", name=name))) == 64


def test_a_missing_function_is_named_with_those_that_are_there(root: Path) -> None:
    with pytest.raises(
        InvalidField, match=r"rewards\.1\.name = 'score'.*found \[compute_score, slowly, root, alias\]"
    ) as caught:
        check(root, Reward(builtin="exact_match"), Reward(path="rewards.py", name="score"))
    assert caught.value.fix == "Set name: compute_score."
    with pytest.raises(InvalidField):
        check(root, Reward(path="rewards.py", name="hidden"))


@pytest.mark.parametrize(
    ("path", "content", "says"),
    [
        ("no.py", None, "no such file"),
        ("../outside.py", None, "lies outside"),
        ("broken.py", "def f(:", "is not Python"),
        ("nul.py", "x = '\0'", "is not Python"),
        ("rewards.txt", "x", "is no Python file"),
        ("empty.py", "", "has no such function; found []"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(root: Path, path: str, content: str | None, says: str) -> None:
    if content is not None:
        (root / path).write_text(content)
    with pytest.raises(InvalidField) as caught:
        check(root, Reward(path=path))
    assert says in str(caught.value)
    assert caught.value.field.startswith("rewards.0.")


def test_the_digest_covers_the_block_and_the_content(root: Path) -> None:
    reward = Reward(path="rewards.py")
    first = check(root, reward)
    assert first == check(root, reward)
    assert first != check(root, Reward(path="rewards.py", weight=2.0))
    (root / "rewards.py").write_text(FILE + "\n")
    assert first != check(root, reward)


@pytest.mark.parametrize("builtin", ["exact_match", "numeric"])
def test_a_comparison_needs_a_right_answer(root: Path, builtin: str) -> None:
    with pytest.raises(InvalidField, match=r"dataset\.label_key.*found \[a, b\]"):
        check(root, Reward(builtin=builtin), has_truth=False)  # type: ignore[arg-type]  # parametrised
    check(root, Reward(builtin="regex", params={"pattern": "x"}), has_truth=False)


def test_a_verifier_needs_generated_rows(root: Path) -> None:
    with pytest.raises(InvalidField, match=r"rewards\.0\.builtin.*found \[a, b\]"):
        check(root, Reward(builtin="reasoning_gym"))
    reward_files.check([Reward(builtin="reasoning_gym")], roots=[root], has_truth=True, columns=["entry", "task"])


def test_a_file_over_the_limit_is_refused(root: Path) -> None:
    (root / "long.py").write_text("#" * (reward_files.MOST_BYTES + 1))
    with pytest.raises(InvalidField, match=f"larger than {reward_files.MOST_BYTES} bytes"):
        check(root, Reward(path="long.py"))
