"""JSON files: one object a line (.jsonl, .jsonl.gz), or an array of objects (.json).

Lines end with LF or CRLF and with nothing else: U+2028 and its like belong to the strings they stand in. A byte order
mark of UTF-8 is passed over. Refused, with file, line and what to do: other encodings, NUL bytes, NaN and Infinity, a
key given twice in one object, half of a surrogate pair, a row that is no object, a file that ends in the middle of a
row.
"""

from __future__ import annotations

import gzip
import json
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from rlharvest.errors import InvalidField

from rlharvest_coordinator.data.rows import Limits, Row, Rows, refuse

_BOM = b"\xef\xbb\xbf"
_UTF16 = (b"\xff\xfe", b"\xfe\xff")


class _Refused(ValueError):
    """A JSON text that is read by others but not by us."""


def read(path: Path, limits: Limits) -> Rows:
    """Yield the rows of a .jsonl, .jsonl.gz or .json file, in order.

    Raises:
        InvalidField: names file and line.
    """
    try:
        if path.name.endswith(".gz"):
            with gzip.open(path, "rb") as packed:
                yield from _lines(path.name, packed, limits)
        else:
            with path.open("rb") as file:
                if path.suffix == ".json" and _first_byte(file) == b"[":
                    yield from _array(path, file, limits)
                else:
                    yield from _lines(path.name, file, limits)
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise refuse(path.name, path.name, f"is no whole gzip file ({error})", "Copy or compress it again.") from error


def _first_byte(file: BinaryIO) -> bytes:
    head = file.read(4096).removeprefix(_BOM).lstrip()[:1]
    file.seek(0)
    return head


def _lines(name: str, file: BinaryIO | gzip.GzipFile, limits: Limits) -> Rows:
    number = 0
    while line := file.readline(limits.row_bytes + 1):
        number += 1
        where = f"{name}, line {number}"
        if len(line) > limits.row_bytes:
            raise refuse(
                name,
                where,
                f"is longer than {limits.row_bytes} bytes",
                "Split the row, or raise the coordinator's limit on row_bytes.",
            )
        if number == 1:
            line = _without_mark(name, line)
        text = _decode(name, where, line)
        if not text.strip():
            continue
        value = _parse(name, where, text, cut=not line.endswith(b"\n"))
        if number == 1 and isinstance(value, list):
            raise _array_in_lines(name, where)
        yield Row(where, _object(name, where, value))


def _array(path: Path, file: BinaryIO, limits: Limits) -> Rows:
    data = file.read(limits.json_bytes + 1)
    if len(data) > limits.json_bytes:
        raise refuse(
            path.name,
            path.name,
            f"is larger than {limits.json_bytes} bytes",
            "Write one object a line into a .jsonl file, which is read row by row.",
        )
    text = _decode(path.name, path.name, _without_mark(path.name, data))
    rows = _parse(path.name, path.name, text, cut=False)
    if not isinstance(rows, list):
        raise refuse(path.name, path.name, "is not an array", "Write [{...}, {...}], or one object a line.")
    for index, value in enumerate(rows):
        where = f"{path.name}, row {index}"
        yield Row(where, _object(path.name, where, value))


def _without_mark(name: str, data: bytes) -> bytes:
    if data.startswith(_UTF16) or data[1:4:2] == b"\0\0" or data[0:3:2] == b"\0\0":
        raise refuse(name, name, "is encoded in UTF-16", "Convert it: iconv -f UTF-16 -t UTF-8.")
    return data.removeprefix(_BOM)


def _decode(name: str, where: str, line: bytes) -> str:
    if b"\0" in line:
        raise refuse(
            name, where, f"holds a NUL byte at column {line.index(0) + 1}", "Remove it; the file may be damaged."
        )
    try:
        return line.decode("utf-8")
    except UnicodeDecodeError as error:
        raise refuse(
            name,
            where,
            f"byte {line[error.start]:#04x} at column {error.start + 1} is not UTF-8",
            "Convert the file, e.g. iconv -f LATIN1 -t UTF-8.",
        ) from error


def _parse(name: str, where: str, text: str, *, cut: bool) -> Any:
    try:
        value = json.loads(text, parse_constant=_no_constant, object_pairs_hook=_no_twins)
        if "\\ud" in text or "\\uD" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}" if error.lineno > 1 else f"column {error.colno}"
        if text.lstrip().startswith("[") and where.endswith("line 1"):
            raise _array_in_lines(name, where) from error
        if cut and error.pos >= len(text.rstrip()) - 1:
            raise refuse(
                name, where, "the file ends in the middle of this row", "Write the file again; the copy was cut off."
            ) from error
        raise refuse(name, where, f"is not JSON ({error.msg} at {place})", "Write one JSON object a line.") from error
    except UnicodeEncodeError as error:
        raise refuse(
            name, where, "holds half of a surrogate pair (\\ud800 to \\udfff)", "Write the character itself in UTF-8."
        ) from error
    except (_Refused, RecursionError, ValueError) as error:
        raise refuse(name, where, str(error), "Correct this row.") from error
    return value


def _no_constant(constant: str) -> Any:
    raise _Refused(f"holds {constant}, which JSON does not have; use null")


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        names = [key for key, _ in pairs]
        twin = next(key for key in result if names.count(key) > 1)
        raise _Refused(f"gives the key {twin!r} twice in one object")
    return result


def _object(name: str, where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise refuse(
            name, where, f"is a {type(value).__name__}, not an object", 'Write objects such as {"prompt": "..."}.'
        )
    return value


def _array_in_lines(name: str, where: str) -> InvalidField:
    return refuse(
        name,
        where,
        "is an array; JSON lines hold one object a line",
        f"Name the file .json, or rewrite it: jq -c '.[]' {name} > rows.jsonl.",
    )
