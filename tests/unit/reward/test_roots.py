"""Reward files lie under the roots, or are refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
from rlharvest_reward.fault import RewardFault
from rlharvest_reward.roots import confined


@pytest.fixture
def root(tmp_path: Path) -> Path:
    directory = tmp_path / "root"
    directory.mkdir()
    (directory / "rewards.py").write_text("")
    (tmp_path / "outside.py").write_text("")
    (directory / "link.py").symlink_to(tmp_path / "outside.py")
    (directory / "good.py").symlink_to(directory / "rewards.py")
    return directory


def test_absolute_and_relative_paths_are_found(root: Path, tmp_path: Path) -> None:
    real = (root / "rewards.py").resolve()
    assert confined(str(root / "rewards.py"), [root]) == real
    assert confined("rewards.py", [tmp_path / "empty", root]) == real
    assert confined("good.py", [root]) == real


@pytest.mark.parametrize("path", ["{root}/../outside.py", "../outside.py", "link.py", "/etc/passwd", "{root}/link.py"])
def test_what_lies_outside_is_refused_with_the_fix(root: Path, path: str) -> None:
    with pytest.raises(RewardFault, match=r"outside of the reward roots .*RLHARVEST_ROOTS") as caught:
        confined(path.format(root=root), [root])
    assert caught.value.kind == "not_found"


@pytest.mark.parametrize("path", ["missing.py", "."])
def test_what_is_no_file_is_refused_with_the_fix(root: Path, path: str) -> None:
    with pytest.raises(RewardFault, match="no such file under the reward roots") as caught:
        confined(path, [root])
    assert caught.value.kind == "not_found"
