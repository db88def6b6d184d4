"""A tokenised dataset is whole or not there, and gives back what was written."""

from __future__ import annotations

import errno
import io
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.errors import CorruptData, DiskFull, NotFound
from rlharvest_coordinator.data.store import TokenisedDataset, Writer

ids = st.lists(st.integers(0, 2**32 - 1), min_size=1, max_size=5)
rows = st.lists(st.tuples(ids, st.text(min_size=1), st.dictionaries(st.text(), st.integers())), min_size=1, max_size=6)


def write(parent: Path, given: list[Any]) -> TokenisedDataset:
    with Writer(parent, "digest") as writer:
        for values, text, columns in given:
            writer.add(values, text, text, columns)
        return TokenisedDataset(writer.finish({"kept": len(given)}))


@settings(deadline=None, max_examples=40)
@given(given_rows=rows)
def test_what_was_written_is_read_back_by_row(given_rows: list[Any]) -> None:
    """Codec property, also for text with any character and columns of any name."""
    with tempfile.TemporaryDirectory() as folder:
        dataset = write(Path(folder), given_rows)
        assert len(dataset) == len(given_rows)
        for row, (values, text, columns) in reversed(list(enumerate(given_rows))):
            assert dataset.prompt_ids(row).tolist() == values
            assert dataset.prompt_text(row) == text
            assert dataset.columns(row) == columns


def test_prompts_are_given_as_json(tmp_path: Path) -> None:
    with Writer(tmp_path, "digest") as writer:
        writer.add([1], "x", [{"role": "user", "content": "ü"}], {})
        dataset = TokenisedDataset(writer.finish({"kept": 1}))
    assert dataset.prompt_json(0) == '[{"role": "user", "content": "ü"}]'
    with pytest.raises(IndexError):
        dataset.prompt_ids(1)
    with pytest.raises(IndexError):
        dataset.prompt_ids(-1)


def test_ids_cannot_be_changed(tmp_path: Path) -> None:
    dataset = write(tmp_path, [([1, 2], "x", {})])
    with pytest.raises(ValueError, match="read-only"):
        dataset.prompt_ids(0)[0] = 5


def test_a_writer_that_stops_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyError), Writer(tmp_path, "digest") as writer:
        writer.add([1], "x", "x", {})
        raise KeyError
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(NotFound):
        TokenisedDataset(tmp_path / "digest")


def test_of_two_writers_the_first_wins_and_both_are_right(tmp_path: Path) -> None:
    with Writer(tmp_path, "digest") as one, Writer(tmp_path, "digest") as two:
        for writer in (one, two):
            writer.add([1], "x", "x", {})
        one.finish({"kept": 1})
        assert len(TokenisedDataset(two.finish({"kept": 1}))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["digest"]


def test_what_a_killed_writer_left_is_swept_after_a_day(tmp_path: Path) -> None:
    for name, age in (("old", 2 * 86400), ("new", 60)):
        (tmp_path / f".{name}.x").mkdir()
        os.utime(tmp_path / f".{name}.x", (time.time() - age, time.time() - age))
    write(tmp_path, [([1], "x", {})])
    assert sorted(path.name for path in tmp_path.iterdir()) == [".new.x", "digest"]


@pytest.mark.parametrize("name", ["ids.bytes", "texts.offsets", "rows.bytes"])
def test_files_that_were_cut_are_found(tmp_path: Path, name: str) -> None:
    dataset = write(tmp_path, [([1, 2], "text", {"a": 1})] * 3)
    path = dataset.directory / name
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(CorruptData, match="delete it"):
        TokenisedDataset(dataset.directory)


def test_a_full_disk_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(DiskFull, match="RLHARVEST_DATA_DIR"):
        write(tmp_path, [([1], "x", {})])
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_still_full_when_the_files_are_closed_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing writes what is buffered once more: its own error is not to stand in for the one that names the fix."""
    monkeypatch.setattr(Path, "open", lambda _path, _mode: io.BufferedWriter(io.FileIO("/dev/full", "w")))
    with pytest.raises(DiskFull, match="RLHARVEST_DATA_DIR"):
        write(tmp_path, [([1], "x", {})])
    assert list(tmp_path.iterdir()) == []
