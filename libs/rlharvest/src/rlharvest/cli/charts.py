"""Curves out of block characters."""

from __future__ import annotations

import math
from collections.abc import Sequence

_BLOCKS = "▁▂▃▄▅▆▇█"
_EIGHTHS = " ▁▂▃▄▅▆▇█"

Series = Sequence[float | None]


def resample(values: Series, width: int) -> list[float | None]:
    """Return at most `width` values: the mean of each bucket, None where a bucket has none."""
    if len(values) <= width:
        return list(values)
    buckets = []
    for column in range(width):
        part = [
            value
            for value in values[column * len(values) // width : (column + 1) * len(values) // width]
            if value is not None and math.isfinite(value)
        ]
        buckets.append(sum(part) / len(part) if part else None)
    return buckets


def sparkline(values: Series, width: int = 24) -> str:
    """Return a curve of one line; a gap is a space."""
    shown = resample(values, width)
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return ""
    low, high = min(known), max(known)
    span = high - low or 1.0
    return "".join(
        " " if value is None or not math.isfinite(value) else _BLOCKS[round((value - low) / span * (len(_BLOCKS) - 1))]
        for value in shown
    )


def plot(values: Series, *, width: int = 60, height: int = 6) -> list[str]:
    """Return a filled curve of `height` lines with its highest and lowest value at the left; nothing without values."""
    shown = resample(values, width)
    known = [value for value in shown if value is not None and math.isfinite(value)]
    if not known:
        return []
    low, high = min(known), max(known)
    span = high - low or 1.0
    # The lowest value still shows one eighth, to tell it from a gap.
    levels = [
        0 if value is None or not math.isfinite(value) else 1 + round((value - low) / span * (height * 8 - 1))
        for value in shown
    ]
    labels = {height - 1: f"{high:.4g}", 0: f"{low:.4g}"}
    margin = max(len(label) for label in labels.values())
    lines = []
    for row in range(height - 1, -1, -1):
        cells = "".join(_EIGHTHS[min(8, max(0, level - row * 8))] for level in levels)
        lines.append(f"{labels.get(row, ''):>{margin}} ┤{cells.rstrip()}")
    return lines
