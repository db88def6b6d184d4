"""What a worker does at which batch size, learned from what it does (RLBoost, arXiv 2510.19225, section on load balancing).

A decode step of b responses with c tokens of context each takes about base(b) + slope * b * c seconds: what the weights and
the arithmetic take, and what reading the keys and values takes. The base is kept by buckets of b as measured, the slope is a
least-squares fit over all steps, so the table holds for contexts that no step had yet.

Invariants (property-tested): a step takes more than 0 s; the plateau is a batch size that was seen; steps that follow the
formula are told back.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass

import numpy as np

BUCKETS = tuple(sorted({round(base * 2**power) for power in range(13) for base in (1, 1.5) if base * 2**power >= 1}))
"""Batch sizes that have a row: 1, 2, 3, 4, 6, 8, 12, ..."""

LEAST_ROWS = 3
"""Rows before there is a plateau."""

_FORGET = 0.995
_WEIGHT = 0.1


@dataclass(slots=True)
class _Row:
    batch: float
    tokens: float
    """b * c, mean."""
    step_s: float


class Throughput:
    """The table of one type of worker."""

    def __init__(self) -> None:
        self._rows: dict[int, _Row] = {}
        self._normal = np.zeros((3, 3))
        self._moment = np.zeros(3)
        self._slope: float | None = None
        self._base: tuple[list[float], list[float]] | None = None

    def observe(self, batch: int, context: float, step_s: float) -> None:
        """Take a measurement in.

        Args:
            batch: responses that decoded. context: tokens of each, mean. step_s: seconds of one decode step.
        """
        if batch < 1 or step_s <= 0:
            return
        key = BUCKETS[max(0, bisect.bisect_right(BUCKETS, batch) - 1)]
        row = self._rows.get(key)
        if row is None:
            self._rows[key] = _Row(batch, batch * context, step_s)
        else:
            row.batch += _WEIGHT * (batch - row.batch)
            row.tokens += _WEIGHT * (batch * context - row.tokens)
            row.step_s += _WEIGHT * (step_s - row.step_s)
        # In units of about one, or the normal equations are singular in float64.
        features = np.array([1.0, batch / 100, batch * context / 1e5])
        self._normal = _FORGET * self._normal + np.outer(features, features)
        self._moment = _FORGET * self._moment + step_s * features
        self._slope = self._base = None

    @property
    def known(self) -> bool:
        """Whether there are rows enough to decide by."""
        return len(self._rows) >= LEAST_ROWS

    @property
    def slope(self) -> float:
        """Seconds that one token of context adds to a step."""
        if self._slope is None:
            ridge = 1e-9 * np.trace(self._normal) * np.eye(3)
            fit = np.linalg.solve(self._normal + ridge, self._moment) if self._rows else np.zeros(3)
            # No row may be told to take less than nothing.
            most = min((row.step_s / row.tokens for row in self._rows.values() if row.tokens > 0), default=0.0)
            self._slope = min(max(0.0, float(fit[2]) / 1e5), 0.99 * most)
        return self._slope

    def step_s(self, batch: float, context: float) -> float:
        """Return about how long a step takes, seconds; extrapolated beyond the rows, 0 before the first measurement."""
        sizes, bases = self._bases()
        if not sizes or batch <= 0:
            return 0.0
        at = bisect.bisect_left(sizes, batch)
        if len(sizes) == 1 or at == 0:
            base = bases[0]
        elif at == len(sizes):
            # As flat or as steep as the last two rows, and never falling.
            rise = max(0.0, (bases[-1] - bases[-2]) / (sizes[-1] - sizes[-2]))
            base = bases[-1] + rise * (batch - sizes[-1])
        else:
            share = (batch - sizes[at - 1]) / (sizes[at] - sizes[at - 1])
            base = (1 - share) * bases[at - 1] + share * bases[at]
        return base + self.slope * batch * context

    def rate(self, batch: float, context: float) -> float:
        """Return about how many tokens/s a worker makes; 0 before the first measurement."""
        step_s = self.step_s(batch, context)
        return batch / step_s if step_s > 0 else 0.0

    def plateau(self, context: float, share: float = 0.9) -> int | None:
        """Return the least batch size seen that makes `share` of the most tokens/s; None while too little is known."""
        if not self.known:
            return None
        sizes, _ = self._bases()
        rates = [self.rate(size, context) for size in sizes]
        enough = share * max(rates)
        return max(1, round(next(size for size, rate in zip(sizes, rates, strict=True) if rate >= enough)))

    def _bases(self) -> tuple[list[float], list[float]]:
        if self._base is None:
            rows = sorted(self._rows.values(), key=lambda row: row.batch)
            slope = self.slope
            self._base = [row.batch for row in rows], [row.step_s - slope * row.tokens for row in rows]
        return self._base
