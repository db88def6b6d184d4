"""Manifests: parts cover files exactly, digests depend on content alone, bad manifests are refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from rlharvest.errors import CorruptData
from rlharvest.weights.manifest import MOST_FILES, FileEntry, Manifest, describe, part_hash, part_range, verify


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=300), st.integers(1, 64))
def test_parts_cover_the_file_without_gap_or_overlap(tmp_path: Path, data: bytes, part_bytes: int) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    entry = describe(path, part_bytes=part_bytes)
    ranges = [part_range(entry, index) for index in range(len(entry.parts))]
    assert b"".join(data[start:end] for start, end in ranges) == data
    assert [part_hash(data[start:end]) for start, end in ranges] == list(entry.parts)
    assert all(start < end for start, end in ranges)
    verify(path, entry)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(min_size=1, max_size=100), st.data())
def test_any_changed_or_missing_byte_is_found(tmp_path: Path, data: bytes, draw: st.DataObject) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    entry = describe(path, part_bytes=16)
    position = draw.draw(st.integers(0, len(data) - 1))
    path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
    with pytest.raises(CorruptData, match=r"model\.bin: blake3"):
        verify(path, entry)
    path.write_bytes(data[:position])
    with pytest.raises(CorruptData, match=f"{position} bytes, the manifest says {len(data)}"):
        verify(path, entry)


def _entry(name: str = "a", **changes: object) -> dict[str, object]:
    return {"name": name, "size": 3, "blake3": "0" * 64, "part_bytes": 2, "parts": ["0" * 32, "1" * 32], **changes}


def test_digest_depends_on_files_alone_and_not_on_their_order() -> None:
    one = Manifest.model_validate({"job": "rljob_a", "step": 0, "files": [_entry("a"), _entry("b")]})
    two = Manifest.model_validate({"job": "rljob_b", "step": 9, "version": 4, "files": [_entry("b"), _entry("a")]})
    assert one.digest == two.digest
    assert len(one.blobs) == 1


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        (_entry("../a"), "plain file name"),
        (_entry(".hidden"), "plain file name"),
        (_entry("a/b"), "plain file name"),
        (_entry(parts=["0" * 32]), "make 2"),
        (_entry(parts=["xyz", "0" * 32]), "pattern"),
        (_entry(size=-1), "greater than"),
        (_entry(blake3="abc"), "pattern"),
        (_entry(colour="red"), "Extra inputs"),
    ],
)
def test_bad_entries_are_refused(entry: dict[str, object], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        FileEntry.model_validate(entry)


def test_repeated_names_and_paths_as_jobs_are_refused() -> None:
    with pytest.raises(ValidationError, match="repeat"):
        Manifest.model_validate({"job": "rljob_a", "step": 0, "files": [_entry(), _entry()]})
    with pytest.raises(ValidationError, match="pattern"):
        Manifest.model_validate({"job": "../a", "step": 0, "files": [_entry()]})


def test_a_version_of_too_many_files_is_refused() -> None:
    files = [FileEntry(name=f"f{at}", size=0, blake3="0" * 64, parts=()) for at in range(MOST_FILES + 1)]
    Manifest(job="j", step=0, files=tuple(files[:-1]))
    with pytest.raises(ValidationError, match=str(MOST_FILES)):
        Manifest(job="j", step=0, files=tuple(files))


@pytest.mark.parametrize("given", [{"step": 1 << 32}, {"version": 1 << 32}, {"parent": 1 << 32}, {"job": "j" * 101},
                                   {"tokenizer_digest": "d" * 201}])  # fmt: skip
def test_numbers_and_texts_of_a_version_are_bounded(given: dict[str, object]) -> None:
    entry = FileEntry(name="f", size=0, blake3="0" * 64, parts=())
    with pytest.raises(ValidationError):
        Manifest.model_validate({"job": "j", "step": 0, "files": (entry,), **given})
