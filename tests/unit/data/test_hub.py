"""Datasets of a hub: configurations and splits are found in the file names of its Parquet branch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlharvest.errors import InvalidField
from rlharvest_coordinator.data import hub

FILES = ["main/train/0001.parquet", "main/train/0000.parquet", "main/test/0000.parquet", "socratic/train/0000.parquet"]


@pytest.fixture(autouse=True)
def files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.HfApi, "list_repo_files", lambda *_args, **_names: [*FILES, "README.md"])
    monkeypatch.setattr(hub, "hf_hub_download", lambda name, file, **_names: str(Path("/cache") / name / file))


def test_the_files_of_a_split_come_in_order() -> None:
    found = hub.dataset_files("openai/gsm8k", configuration="main", split="train")
    assert found == [Path(f"/cache/openai/gsm8k/main/train/000{n}.parquet") for n in (0, 1)]


@pytest.mark.parametrize(
    ("configuration", "split", "field", "says"),
    [
        (None, "train", "dataset.name", "Set one of main, socratic"),
        ("easy", "train", "dataset.name", "It has: main, socratic"),
        ("socratic", "test", "dataset.split", "It has: train"),
    ],
)
def test_what_is_not_there_is_named_with_what_is(configuration: str | None, split: str, field: str, says: str) -> None:
    with pytest.raises(InvalidField, match=says) as caught:
        hub.dataset_files("openai/gsm8k", configuration=configuration, split=split)
    assert caught.value.field == field


def test_a_single_configuration_needs_no_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub.HfApi, "list_repo_files", lambda *_args, **_names: ["default/train/0000.parquet"])
    assert len(hub.dataset_files("x/y", configuration=None, split="train")) == 1


def test_a_hub_that_does_not_answer_names_the_local_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_args: Any, **_names: Any) -> list[str]:
        raise OSError("no route to host")

    monkeypatch.setattr(hub.HfApi, "list_repo_files", fail)
    with pytest.raises(InvalidField, match=r"no route to host.*directory of them, or reasoning-gym:<task>"):
        hub.dataset_files("x/y", configuration=None, split="train")


@pytest.mark.parametrize(
    ("name", "is_model"), [("a/b", True), ("a", False), ("/a/b", False), ("a/b/c", False), ("../b", False)]
)
def test_only_owner_and_name_look_like_a_model_of_a_hub(name: str, is_model: bool) -> None:
    assert hub.looks_like_model(name) is is_model
