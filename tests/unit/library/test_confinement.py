"""What is read lies below a root, whatever links say before, while or after it is opened."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rlharvest import confinement
from rlharvest.errors import CorruptData


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    (root / "models").mkdir(parents=True)
    (root / "models" / "file").write_bytes(b"inside")
    (root / "good").symlink_to(root / "models" / "file")
    (tmp_path / "secret").write_bytes(b"outside")
    (root / "bad").symlink_to(tmp_path / "secret")
    (root / "up").symlink_to(tmp_path)
    return root


def test_files_below_a_root_are_read_through_links_that_stay_inside(root: Path) -> None:
    for name in ("models/file", "good", "models/../good"):
        assert confinement.read(root / name, [root.parent / "other", root], most=6) == b"inside"


@pytest.mark.parametrize("name", ["bad", "up/secret", "../secret"])
def test_nothing_outside_is_read(root: Path, name: str) -> None:
    with pytest.raises(CorruptData, match="leads outside of the directories that jobs may use"):
        confinement.read(root / name, [root], most=100)


def test_a_link_that_is_turned_around_between_opening_and_check_gives_nothing(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both ways: opened outside and checked inside, opened inside and checked outside."""
    real_open = os.open
    places = [root.parent / "secret", root / "models" / "file"]

    def turning(path: Path, flags: int) -> int:
        descriptor = real_open(path, flags)
        target = places[0] if path.resolve() == places[1] else places[1]
        path.unlink()
        path.symlink_to(target)
        return descriptor

    monkeypatch.setattr(os, "open", turning)
    for name in ("bad", "good"):
        with pytest.raises(CorruptData, match="leads outside"):
            confinement.read(root / name, [root], most=100)


def test_pipes_directories_and_large_files_are_refused_at_once(root: Path) -> None:
    os.mkfifo(root / "pipe")
    for name, problem in (("pipe", "no regular file"), ("models", "no regular file"), ("good", "over the limit of 5")):
        with pytest.raises(CorruptData, match=problem):
            confinement.read(root / name, [root], most=5)


def test_links_that_lead_outside_are_named(root: Path) -> None:
    assert confinement.strays(root, [root]) == ["bad", "up"]
    assert confinement.strays(root / "models", [root]) == []
