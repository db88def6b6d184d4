"""Whether a series rises: the slope of its least-squares line and how sure that is. Pure.

Memory of a process moves in stairs, so neighbouring samples are not independent; the variance is therefore Newey and
West's (Econometrica 55, 1987), with Bartlett weights over the square root of their number of lags.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

NORMAL = 1.959964
"""Half of a 95 % interval, in standard deviations."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Units of the series for each unit of its axis."""

    slope: float
    low: float
    high: float
    """95 % confidence interval."""


def trend(at: Sequence[float], values: Sequence[float]) -> Trend:
    """Return the trend of a series; raise ValueError for fewer than three different places."""
    if len(set(at)) < 3:
        raise ValueError(f"{len(at)} samples at {len(set(at))} places have no trend")
    x, y = np.asarray(at, float), np.asarray(values, float)
    n = len(x)
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    scores = centred * (y - y.mean() - slope * centred)
    lags = min(n - 1, max(1, round(math.sqrt(n))))
    variance = float(scores @ scores)
    for lag in range(1, lags + 1):
        variance += 2 * (1 - lag / (lags + 1)) * float(scores[lag:] @ scores[:-lag])
    half = NORMAL * math.sqrt(max(variance, 0.0) * n / (n - 2)) / spread
    return Trend(slope, slope - half, slope + half)
