"""Rows of a dataset, whatever they come from: where each stands, and its columns.

Invariants: a row's place is named as a person would look it up (file and line, or file and row); a row's columns are
plain JSON values; nothing is skipped but blank lines; every size is bounded by `Limits`.
"""

from __future__ import annotations

import datetime
import decimal
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rlharvest.errors import InvalidField

FIELD = "dataset.path"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Largest sizes that are read."""

    row_bytes: int = 16 << 20
    """Of one line of JSON lines."""

    json_bytes: int = 512 << 20
    """Of a .json file, which is read as a whole."""

    rows: int = 10_000_000
    """Of a dataset."""


@dataclass(frozen=True, slots=True)
class Row:
    """One row: `where` for messages (`train.jsonl, line 3`), `columns` by name."""

    where: str
    columns: dict[str, Any]


Rows = Iterator[Row]


def refuse(path: str, where: str, problem: str, fix: str) -> InvalidField:
    """Return the error about a place in the dataset."""
    return InvalidField(FIELD, path, f"{where}: {problem}" if where else problem, fix)


def plain(value: Any, where: str, column: str) -> Any:
    """Return a value of Arrow or Python as a JSON value: dates as ISO 8601, decimals as text, NaN as null.

    Raises:
        InvalidField: the value has no JSON form (bytes, an image).
    """
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(item, where, column) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, where, column) for item in value]
    if isinstance(value, datetime.datetime | datetime.date | datetime.time):
        return value.isoformat()
    if isinstance(value, decimal.Decimal | datetime.timedelta):
        return str(value)
    raise InvalidField(
        FIELD,
        column,
        f"{where}: column {column!r} holds {type(value).__name__}, which has no JSON form, so no reward can get it",
        "Drop this column from the file.",
    )
