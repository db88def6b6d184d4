"""A safetensors file that is not whole is refused with its name, its size and the size it should have."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlharvest.errors import CorruptData
from rlharvest.weights.safetensors_check import check

HEADER = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "empty": {"dtype": "I64", "shape": [0], "data_offsets": [32, 32]},
}


def _file(header: object = HEADER, data: bytes = bytes(32)) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def test_a_whole_file_gives_its_shapes(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(_file())
    assert check(path) == {"a": (2, 3), "b": (4,), "empty": (0,)}


def test_files_of_the_reference_library_are_whole(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    library = pytest.importorskip("safetensors.numpy")
    path = tmp_path / "model.safetensors"
    library.save_file(
        {"x": numpy.zeros((3, 5), numpy.float16), "y": numpy.zeros(7, numpy.int8), "z": numpy.array(1, numpy.float32)},
        path,
        metadata={"format": "pt"},
    )
    assert check(path) == {"x": (3, 5), "y": (7,), "z": ()}


WHOLE = _file()
DATA_START = len(WHOLE) - 32


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", ["0 bytes", "empty"]),
        (WHOLE[:5], ["5 bytes"]),
        (WHOLE[:40], ["40 bytes", f"ends at byte {DATA_START}", "cut short"]),
        (WHOLE[: DATA_START + 10], [f"{DATA_START + 10} bytes", f"describes {len(WHOLE)}", "cut short"]),
        (WHOLE[:-1], [f"{len(WHOLE) - 1} bytes", f"describes {len(WHOLE)}", "cut short"]),
        (WHOLE + bytes(7), [f"{len(WHOLE) + 7} bytes", f"describes {len(WHOLE)}", "trail"]),
        (b"<!DOCTYPE html><html><body>502 Bad Gateway</body></html>", ["56 bytes", "web page"]),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\nsize 9\n", ["Git LFS"]),
        (struct.pack("<Q", 1 << 63) + bytes(100), [f"{1 << 63} bytes", "108 bytes"]),
        (struct.pack("<Q", 4) + b"{{{{" + bytes(9), ["not JSON"]),
        (struct.pack("<Q", 4) + b"\xff\xfe\x00\x01" + bytes(9), ["not JSON"]),
        (_file([1, 2]), ["not an object"]),
    ],
)
def test_broken_files_are_named_with_their_sizes(tmp_path: Path, data: bytes, words: list[str]) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    with pytest.raises(CorruptData) as caught:
        check(path)
    for word in ["model.safetensors", *words]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("entry", "problem"),
    [
        ({"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}, "takes 24"),
        ({"dtype": "Q7", "shape": [1], "data_offsets": [0, 1]}, "unknown dtype"),
        ({"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}, "malformed"),
        ({"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}, "malformed"),
        ({"dtype": "F32", "shape": "x", "data_offsets": [0, 4]}, "malformed"),
        ({"dtype": "F32", "shape": [1]}, "malformed"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}, "starts at byte 4"),
        (3, "malformed"),
    ],
)
def test_broken_entries_name_the_tensor(tmp_path: Path, entry: object, problem: str) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(_file({"weight": entry}))
    with pytest.raises(CorruptData, match=f"(?s)'weight'.*{problem}"):
        check(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.integers(0, len(WHOLE) - 1))
def test_every_truncation_is_found(tmp_path: Path, length: int) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(WHOLE[:length])
    with pytest.raises(CorruptData, match=f"{length} bytes"):
        check(path)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_give_another_error(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(data)
    try:
        check(path)
    except CorruptData:
        pass
