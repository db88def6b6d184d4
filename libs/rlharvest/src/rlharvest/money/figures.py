"""What a bill means: per step, per million tokens, against reserved workers alone, and at the end of the run.

Figures are exact fractions of dollars; the band of a forecast alone is an estimate. What is not known is None, never 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

from rlharvest.money.amount import Money

WINDOW = 20
"""Newest steps that a forecast is made of: prices, lengths and the number of workers change on the way."""

BAND = 2.0
"""Standard errors on each side."""


def per_step(total: Money, steps: int) -> Fraction | None:
    """Return dollars for an optimizer step."""
    return total.dollars / steps if steps else None


def per_million(total: Money, tokens: int) -> Fraction | None:
    """Return dollars for a million tokens, generated and trained."""
    return total.dollars * 1_000_000 / tokens if tokens else None


def reserved_alone(*, reserved_per_hour: Money, tokens: int, tokens_per_s: Fraction) -> Money | None:
    """Return what the reserved workers alone would have cost for the same tokens, at the rate that they have alone.

    Rounded to a whole tick. None without a rate.
    """
    if tokens_per_s <= 0:
        return None
    hours = Fraction(tokens) / tokens_per_s / 3600
    return Money(round(reserved_per_hour.ticks * hours))


def saved(total: Money, *, reserved_per_hour: Money, tokens: int, tokens_per_s: Fraction) -> Money | None:
    """Return how much less the run cost than reserved workers alone would have; negative if it cost more."""
    alone = reserved_alone(reserved_per_hour=reserved_per_hour, tokens=tokens, tokens_per_s=tokens_per_s)
    return None if alone is None else alone - total


def efficiency(*, speedup: Fraction, reserved: Money, spot: Money) -> Fraction:
    """Return tokens per dollar against the reserved workers alone: the speedup over the growth of the bill.

    With an average of n spot workers of price p beside reserved ones of price P this is speedup / (1 + n p / P) (RLBoost,
    arXiv 2510.19225, section 6).

    Args:
        speedup: tokens a second against those of the reserved workers alone.
        reserved, spot: what each cost over the same time.
    """
    return speedup / (1 + spot / reserved)


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a run will have cost, in dollars."""

    expected: Fraction
    low: float
    high: float
    steps_left: int


def forecast(total: Money, steps: Sequence[Money], *, steps_left: int, window: int = WINDOW) -> Forecast | None:
    """Return what the run will have cost at its end; None before its first step.

    Args:
        total: cost so far.
        steps: cost of each step so far, oldest first; the newest `window` are used.
    """
    recent = [step.dollars for step in steps[-window:]]
    if not recent:
        return None
    mean = sum(recent, Fraction()) / len(recent)
    expected = total.dollars + mean * steps_left
    # Of a sum of steps_left steps whose mean is known to a standard error: both the mean's error and their own spread.
    variance = sum(float(step - mean) ** 2 for step in recent) / max(1, len(recent) - 1)
    error = math.sqrt(variance * (steps_left + steps_left**2 / len(recent)))
    return Forecast(
        expected,
        low=max(float(total.dollars), float(expected) - BAND * error),
        high=float(expected) + BAND * error,
        steps_left=steps_left,
    )
