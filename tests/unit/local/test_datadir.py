"""The data directory: one owner, and files that survive."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from rlharvest.errors import Conflict, InvalidField
from rlharvest.local.datadir import DataDirectory


def test_a_second_owner_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    first, second = DataDirectory(tmp_path / "d"), DataDirectory(tmp_path / "d")
    first.create()
    first.acquire()
    with pytest.raises(Conflict, match=f"already up on .* \\(pid {os.getpid()}\\)"):
        second.acquire()
    first.release()
    second.acquire()
    second.release()


def test_json_files_are_replaced_whole_and_a_broken_one_reads_as_empty(tmp_path: Path) -> None:
    data = DataDirectory(tmp_path)
    data.write("ports.json", {"api": 1})
    assert data.read("ports.json") == {"api": 1}
    (tmp_path / "ports.json").write_text('{"api": ')
    assert data.read("ports.json") == {}
    data.remove("ports.json")
    data.remove("ports.json")
    assert data.read("ports.json") == {}


def test_a_place_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidField, match="--data"):
        DataDirectory(tmp_path / "file").create()
