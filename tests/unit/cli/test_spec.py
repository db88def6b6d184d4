"""From a job file to what the server gets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlharvest.cli import spec
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import parse

JOB = """
model: model
dataset: {path: data/train.jsonl}
rewards:
  - {path: rewards.py, weight: 0.5}
  - {builtin: exact_match}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    path = tmp_path / "job.yaml"
    path.write_text(JOB)
    return path


def test_paths_are_relative_to_the_file_and_sent_absolute(file: Path) -> None:
    job = spec.load(file)
    assert job["model"] == str(file.parent / "model")
    assert job["dataset"]["path"] == str(file.parent / "data" / "train.jsonl")
    assert job["rewards"][0] == {"path": str(file.parent / "rewards.py"), "weight": 0.5}
    parse(job)
    assert spec.load(file, absolute=False)["model"] == "model"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("model", "Qwen/Qwen3-0.6B"),
        ("dataset.path", "hf://openai/gsm8k"),
        ("dataset.path", "reasoning-gym:basic_arithmetic"),
    ],
)
def test_names_that_are_no_paths_stay_as_they_are(file: Path, field: str, value: str) -> None:
    job: Any = spec.load(file, [f"{field}={value}"])
    for key in field.split("."):
        job = job[key]
    assert job == value


def test_settings_go_over_the_file_with_their_yaml_type(file: Path) -> None:
    job = spec.load(file, ["limits.max_steps=7", "rewards.1.weight=2", "sampling.stop=['\\n', x]", "metadata.a=b=c"])
    assert job["limits"] == {"max_steps": 7}
    assert job["rewards"][1]["weight"] == 2
    assert job["sampling"]["stop"] == ["\\n", "x"]
    assert job["metadata"] == {"a": "b=c"}


def test_names_of_other_tools_are_understood_and_their_paths_made_absolute(file: Path) -> None:
    file.write_text(JOB.replace("dataset: {path: data/train.jsonl}", "data: {train_files: data/train.jsonl}"))
    assert spec.load(file)["dataset"]["path"] == str(file.parent / "data" / "train.jsonl")


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("limits", "not of the form"),
        ("=1", "not of the form"),
        ("model.x=1", "which has no fields"),
        ("rewards.7.weight=1", "no place in a list of 2"),
        ("seed=[", "not YAML"),
    ],
)
def test_a_setting_that_cannot_be_used_is_named(file: Path, setting: str, message: str) -> None:
    with pytest.raises(InvalidField, match=message):
        spec.load(file, [setting])


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"a: [1", "line 1"), (b"- 1", "holds no mapping"), (b"\xff\xfe\xfa", "not UTF-8"), (b"", "holds no mapping")],
)
def test_a_file_that_is_no_job_is_refused_with_the_place(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    with pytest.raises(InvalidField, match=message):
        spec.load(file)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="No such file"):
        spec.load(tmp_path / "none.yaml")


def test_a_byte_order_mark_and_crlf_are_no_matter(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + JOB.replace("\n", "\r\n").encode())
    assert spec.load(file)["rewards"][1] == {"builtin": "exact_match"}


def test_a_file_over_the_limit_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_bytes(b"#" * (spec.MOST_BYTES + 1))
    with pytest.raises(InvalidField, match="larger than 4 MiB"):
        spec.load(path)
