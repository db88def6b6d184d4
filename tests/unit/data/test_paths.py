"""Jobs reach nothing outside of the roots."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlharvest.errors import InvalidField
from rlharvest_coordinator.data.paths import confine


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "a root ü"
    (root / "models" / "tiny").mkdir(parents=True)
    (tmp_path / "secret").write_text("x")
    return root


@pytest.mark.parametrize("value", ["models/tiny", "models/tiny/", "./models/../models/tiny", "{root}/models/tiny"])
def test_paths_below_a_root_are_found(root: Path, value: str) -> None:
    assert confine("model", value.format(root=root), [root.parent / "other", root]) == (root / "models/tiny").resolve()


@pytest.mark.parametrize(
    "value", ["../secret", "{root}/../secret", "/etc/passwd", "/no/such/file", "~", "link", "models/../../secret"]
)
def test_paths_outside_are_refused_alike_whether_they_exist_or_not(root: Path, value: str) -> None:
    (root / "link").symlink_to(root.parent / "secret")
    with pytest.raises(InvalidField, match="lies outside of the directories that jobs may use") as caught:
        confine("model", value.format(root=root), [root])
    assert caught.value.field == "model"


def test_what_is_not_there_is_named_with_the_roots(root: Path) -> None:
    with pytest.raises(InvalidField, match="no such file or directory"):
        confine("dataset.path", "models/huge", [root])
    with pytest.raises(InvalidField, match="NUL"):
        confine("dataset.path", "models\0", [root])


def test_a_link_inside_the_root_is_followed(root: Path) -> None:
    (root / "snapshot").symlink_to(root / "models" / "tiny")
    assert confine("model", "snapshot", [root]) == (root / "models/tiny").resolve()


@pytest.mark.parametrize(
    "value", ["http://127.0.0.1/d.jsonl", "https://h/m", "s3://b/k", "file:///etc/passwd", "hf://x"]
)
@pytest.mark.parametrize("field", ["model", "dataset.path", "rewards.0.path"])
def test_no_address_is_fetched(root: Path, field: str, value: str) -> None:
    with pytest.raises(InvalidField, match="is a URL, and the server fetches none") as caught:
        confine(field, value, [root])
    assert caught.value.field == field
