"""A part of a list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class Page(Generic[Row]):
    """Rows in the order of the list, and whether more follow."""

    rows: list[Row]
    has_more: bool


def page(rows: Sequence[Row], limit: int) -> Page[Row]:
    """Return the page of `limit` rows out of a query that asked for one more."""
    return Page(list(rows[:limit]), len(rows) > limit)
