"""Dirty files: what is read the same, and what is refused with file, line and fix."""

from __future__ import annotations

import gzip
import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest_coordinator.data import jsonlines
from rlharvest_coordinator.data.rows import Limits

ROWS = [
    {"prompt": "one\u2028line", "n": 1},
    {"prompt": "naïve 日本 🙂 \u0645", "n": None},
    {"prompt": "<|im_end|></s>", "n": [1, 2]},
    {"prompt": "\x85 \x0b \x1c", "n": {"a": 1.5}},
    {"prompt": "", "n": True},
]
LINES = [json.dumps(row, ensure_ascii=False).encode() for row in ROWS]
BOM = b"\xef\xbb\xbf"


def rows(path: Path, limits: Limits | None = None) -> list[dict[str, Any]]:
    return [row.columns for row in jsonlines.read(path, limits or Limits())]


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"\n".join(LINES) + b"\n", id="LF"),
        pytest.param(b"\r\n".join(LINES) + b"\r\n", id="CRLF"),
        pytest.param(BOM + b"\n".join(LINES) + b"\n", id="BOM"),
        pytest.param(BOM + b"\r\n".join(LINES) + b"\r\n", id="BOM and CRLF"),
        pytest.param(b"\n".join(LINES) + b"\n\n \n\t\n", id="blank lines at the end"),
        pytest.param(b"\n\n".join(LINES) + b"\n", id="blank lines between"),
        pytest.param(b"\n".join(LINES), id="no final newline"),
        pytest.param(b"\n" + b"\n".join(LINES), id="blank first line"),
        pytest.param(b"\n".join(json.dumps(row).encode() for row in ROWS), id="escapes"),
    ],
)
@pytest.mark.parametrize("packed", [False, True])
def test_ends_of_lines_and_marks_change_nothing(tmp_path: Path, content: bytes, packed: bool) -> None:
    path = tmp_path / ("rows.jsonl.gz" if packed else "rows.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    assert rows(path) == ROWS


@pytest.mark.parametrize(
    ("content", "line", "says"),
    [
        pytest.param("\n".join(["{}"] * 3).encode("utf-16"), None, "UTF-16", id="UTF-16 with mark"),
        pytest.param('{"a": 1}\n'.encode("utf-16-le"), None, "UTF-16", id="UTF-16 without mark"),
        pytest.param('{"a": 1}\n'.encode("utf-16-be"), None, "UTF-16", id="UTF-16 big-endian"),
        pytest.param(b'{}\n{"a": "caf\xe9"}\n', 2, "column 11 is not UTF-8", id="Latin-1"),
        pytest.param(b'{}\n{"a": "\x00"}\n', 2, "NUL", id="NUL"),
        pytest.param(b"\n".join(LINES)[:-4], 5, "ends in the middle", id="truncated"),
        pytest.param(b"{}\n{}\n{nope}\n{}\n", 3, "is not JSON", id="invalid line"),
        pytest.param(b'{}\n{"a": 1,}\n', 2, "is not JSON", id="trailing comma"),
        pytest.param(b'{"a": NaN}\n', 1, "NaN", id="NaN"),
        pytest.param(b'{"a": -Infinity}\n', 1, "Infinity", id="Infinity"),
        pytest.param(b'{"a": 1, "b": 2, "a": 3}\n', 1, "'a' twice", id="a key twice"),
        pytest.param(b'{"a": "\\ud83d"}\n', 1, "surrogate", id="half a surrogate pair"),
        pytest.param(b'[{"a": 1}]\n', 1, "Name the file .json", id="array"),
        pytest.param(b'[\n{"a": 1}\n]\n', 1, "Name the file .json", id="array over lines"),
        pytest.param(b'{}\n"text"\n', 2, "is a str, not an object", id="no object"),
        pytest.param(b"[" * 100_000 + b"\n", 1, "", id="nested without end"),
        pytest.param(b'{"a": ' + b"9" * 5000 + b"}\n", 1, "", id="a number without end"),
        pytest.param(b'{}\n{"a": "' + b"x" * 300_000 + b'"}\n', 2, "longer than 200000 bytes", id="long row"),
    ],
)
def test_what_cannot_be_read_is_refused_with_its_line(
    tmp_path: Path, content: bytes, line: int | None, says: str
) -> None:
    path = tmp_path / "dirty.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidField) as caught:
        rows(path, Limits(row_bytes=200_000))
    message = str(caught.value)
    assert caught.value.field == "dataset.path"
    assert says in message
    assert ("dirty.jsonl" if line is None else f"dirty.jsonl, line {line}:") in message
    assert caught.value.fix.endswith(".")


def test_a_long_row_below_the_limit_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.jsonl"
    path.write_text(json.dumps({"prompt": "x" * (1 << 20)}) + "\n")
    assert len(rows(path)[0]["prompt"]) == 1 << 20


def test_a_json_file_is_an_array_or_lines(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(BOM + b"\r\n " + json.dumps(ROWS, indent=1).encode())
    assert rows(path) == ROWS
    path.write_bytes(b"\n".join(LINES))
    assert rows(path) == ROWS


@pytest.mark.parametrize("content", [b"[1]", b"[", b'[{"a": 1}', b'{\n "a": 1\n}'])
def test_a_json_file_that_is_neither_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(content)
    with pytest.raises(InvalidField, match=r"rows\.json"):
        rows(path)


@pytest.mark.parametrize("cut", [10, 1])
def test_a_cut_off_gzip_file_is_refused(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(gzip.compress(b"\n".join(LINES))[:-cut])
    with pytest.raises(InvalidField, match="gzip"):
        rows(path)


def test_a_file_that_is_no_gzip_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl.gz"
    path.write_bytes(b"{}\n")
    with pytest.raises(InvalidField, match="gzip"):
        rows(path)


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


@settings(deadline=None, max_examples=40)
@given(
    values=st.lists(st.dictionaries(st.text(), json_values, max_size=4), min_size=1, max_size=5),
    ending=st.sampled_from(["\n", "\r\n", "\n\n"]),
    ascii=st.booleans(),
)
def test_whatever_json_writes_is_read_back(values: list[dict[str, Any]], ending: str, ascii: bool) -> None:
    """Codec property: json.dumps, one object a line, then read, gives the rows."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        path.write_bytes(ending.join(json.dumps(value, ensure_ascii=ascii) for value in values).encode())
        assert rows(path) == values


def test_an_array_over_the_limit_is_refused_with_the_way_out(tmp_path: Path) -> None:
    path = tmp_path / "rows.json"
    path.write_bytes(b'[{"a": 1}, {"a": 2}]')
    assert len(rows(path, Limits(json_bytes=20))) == 2
    with pytest.raises(InvalidField, match=r"larger than 19 bytes.*one object a line into a \.jsonl file"):
        rows(path, Limits(json_bytes=19))
