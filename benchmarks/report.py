"""What a benchmark found: figures, the bars that they must meet, a table for people and one JSON line for programs.

Invariants: a bar is missed that has no figure, one that is not finite, or one of fewer measurements than MEASUREMENTS; a
report without bars is not ok; the exit status is 0 if and only if every bar is met.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field

MEASUREMENTS = 5
"""A median is taken of at least so many."""


@dataclass(frozen=True, slots=True)
class Figure:
    """Measurements of one quantity; its value is their median."""

    name: str
    unit: str
    values: tuple[float, ...]
    exact: bool = False
    """It is one count of the whole run, not a median."""

    @property
    def value(self) -> float | None:
        """The median, or None where it would mean nothing."""
        if len(self.values) < (1 if self.exact else MEASUREMENTS) or not all(map(math.isfinite, self.values)):
            return None
        return statistics.median(self.values)


@dataclass(frozen=True, slots=True)
class Bar:
    """The most, or the least, that a figure may be."""

    figure: Figure | None
    limit: float
    meaning: str
    least: bool = False

    @property
    def met(self) -> bool:
        value = self.figure.value if self.figure is not None else None
        if value is None or not math.isfinite(self.limit):
            return False
        return value >= self.limit if self.least else value <= self.limit

    @property
    def text(self) -> str:
        """The bar for people."""
        return f"{'≥' if self.least else '≤'} {_number(self.limit)} ({self.meaning})"


@dataclass(slots=True)
class Report:
    """One run of one benchmark."""

    bench: str
    figures: dict[str, Figure] = field(default_factory=dict)
    bars: dict[str, Bar] = field(default_factory=dict)

    def median(self, name: str, unit: str, values: Sequence[float]) -> None:
        """Take measurements of one quantity in."""
        self.figures[name] = Figure(name, unit, tuple(map(float, values)))

    def count(self, name: str, unit: str, value: float) -> None:
        """Take a count over the whole run in."""
        self.figures[name] = Figure(name, unit, (float(value),), exact=True)

    def bar(self, name: str, limit: float, meaning: str) -> None:
        """Say that figure `name` must be at most `limit`; a figure that is not there misses its bar."""
        self.bars[name] = Bar(self.figures.get(name), float(limit), meaning)

    def least(self, name: str, limit: float, meaning: str) -> None:
        """Say that figure `name` must be at least `limit`; a figure that is not there misses its bar."""
        self.bars[name] = Bar(self.figures.get(name), float(limit), meaning, least=True)

    def none(self, *names: str) -> None:
        """Say that each of these figures must be 0."""
        for name in names:
            self.bar(name, 0, "none")

    @property
    def ok(self) -> bool:
        """Whether there are bars and all are met."""
        return bool(self.bars) and all(bar.met for bar in self.bars.values())

    @property
    def status(self) -> int:
        """Exit status of the process."""
        return 0 if self.ok else 1

    def table(self) -> str:
        """Return the lines for people."""
        rows = [("figure", "median", "least", "most", "n", "bar", "")]
        for figure in self.figures.values():
            bar = self.bars.get(figure.name)
            spread = not figure.exact and figure.values
            rows.append(
                (
                    figure.name.replace("_", " "),
                    f"{_number(figure.value)} {figure.unit}",
                    _number(min(figure.values)) if spread else "",
                    _number(max(figure.values)) if spread else "",
                    str(len(figure.values)),
                    bar.text if bar is not None else "",
                    "" if bar is None else "met" if bar.met else "MISSED",
                )
            )
        rows += [
            (name.replace("_", " "), "not measured", "", "", "0", bar.text, "MISSED")
            for name, bar in self.bars.items()
            if name not in self.figures
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        return "\n".join(
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
        )

    def line(self) -> str:
        """Return the JSON line for programs."""
        return json.dumps(
            {
                "bench": self.bench,
                "figures": {name: _rounded(figure.value) for name, figure in self.figures.items()},
                "bars": {
                    name: {
                        "value": _rounded(bar.figure.value if bar.figure is not None else None),
                        "limit": _rounded(bar.limit),
                        "ok": bar.met,
                    }
                    for name, bar in self.bars.items()
                },
                "ok": self.ok,
            },
            allow_nan=False,
        )

    def finish(self) -> int:
        """Print everything; return the exit status."""
        print(self.table())
        print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} processors")
        print(self.line(), flush=True)
        return self.status


def _rounded(value: float | None) -> float | None:
    return round(value, 4) if value is not None and math.isfinite(value) else None


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}".rstrip("0").rstrip(".")
