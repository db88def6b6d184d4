"""An amount of money, exact.

Invariant: nothing is rounded before it is shown. The unit is a micro-dollar for each hour, times a millisecond: any price of
whole micro-dollars an hour over any whole number of milliseconds is a whole number of them, so sums are exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Decimal
from fractions import Fraction
from typing import Final

MICRO: Final = 1_000_000
"""Micro-dollars in a dollar."""

HOUR_MS: Final = 3_600_000

TICKS_PER_DOLLAR: Final = MICRO * HOUR_MS


@dataclass(frozen=True, slots=True, order=True)
class Money:
    """An amount, in ticks of 1 / (3.6e12) dollar."""

    ticks: int = 0

    @classmethod
    def usd(cls, dollars: str | int | Decimal | Fraction) -> Money:
        """Return an amount of dollars.

        Raises:
            ValueError: it is no number, or no whole number of ticks. Every amount of whole micro-dollars is one.
        """
        try:
            ticks = Fraction(dollars) * TICKS_PER_DOLLAR
        except (OverflowError, ZeroDivisionError) as error:
            raise ValueError(f"{dollars} is no amount of money") from error
        if ticks.denominator != 1:
            raise ValueError(f"{dollars} dollars is finer than an amount can be; give whole micro-dollars")
        return cls(ticks.numerator)

    @classmethod
    def of(cls, *, micro_per_hour: int, ms: int) -> Money:
        """Return what `ms` milliseconds cost at a price of `micro_per_hour` micro-dollars an hour."""
        return cls(micro_per_hour * ms)

    @property
    def dollars(self) -> Fraction:
        """Dollars, exact."""
        return Fraction(self.ticks, TICKS_PER_DOLLAR)

    @property
    def micros(self) -> int:
        """Whole micro-dollars, halves to even: what a database or the API keeps."""
        return round(Fraction(self.ticks, HOUR_MS))

    def __add__(self, other: Money) -> Money:
        return Money(self.ticks + other.ticks)

    def __sub__(self, other: Money) -> Money:
        return Money(self.ticks - other.ticks)

    def __truediv__(self, other: Money) -> Fraction:
        """Return how many times `other` it is.

        Raises:
            ZeroDivisionError: `other` is nothing.
        """
        return Fraction(self.ticks, other.ticks)

    def __bool__(self) -> bool:
        return self.ticks != 0

    def __str__(self) -> str:
        """Return it for people, in cents; amounts below a dollar with four places."""
        return show(self.dollars)


NOTHING: Final = Money()


def show(dollars: Fraction) -> str:
    """Return dollars for people: `$1,234.57`, below one dollar `$0.0123`."""
    places = 2 if abs(dollars) >= 1 or dollars == 0 else 4
    value = Decimal(dollars.numerator) / Decimal(dollars.denominator)
    rounded = value.quantize(Decimal(1).scaleb(-places), rounding=ROUND_HALF_EVEN)
    return f"{'-' if rounded < 0 else ''}${abs(rounded):,.{places}f}"


def milliseconds(seconds: float) -> int:
    """Return seconds of a clock as whole milliseconds, which is what bills count in."""
    return round(seconds * 1000)
