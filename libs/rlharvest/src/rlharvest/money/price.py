"""What a worker of some type costs, and how its provider counts time.

Invariant: prices are whole micro-dollars an hour of one worker, with all its GPUs; a finer one is refused, not rounded.
"""

from __future__ import annotations

from decimal import Decimal
from typing import Annotated, Literal

from pydantic import Field

from rlharvest.jobs.blocks import Block, ShortText
from rlharvest.money.amount import MICRO, Money

Dollars = Annotated[Decimal, Field(ge=0, le=1_000_000, decimal_places=6)]
"""Of one hour, or a sum; whole micro-dollars."""

Market = Literal["reserved", "spot"]

INCREMENT_MS = {"millisecond": 1, "second": 1_000, "minute": 60_000, "hour": 3_600_000}


class Billing(Block):
    """How a provider counts the time of one lease: from its start to its end, used or not."""

    increment: Literal["millisecond", "second", "minute", "hour"] = "second"
    """A begun one is billed whole."""

    minimum_s: int = Field(0, ge=0, le=31_536_000)
    """Least time that a lease is billed."""

    boot: bool = True
    """Whether the time until the worker is ready is billed."""

    free_if_interrupted_within_s: int = Field(0, ge=0, le=31_536_000)
    """A lease that the provider ends so early is not billed."""

    def billed_ms(self, *, used_ms: int, boot_ms: int = 0, interrupted: bool = False) -> int:
        """Return the milliseconds that a lease is billed for.

        Args:
            used_ms: from its start to its end. boot_ms: of those, until it was ready.
            interrupted: the provider ended it.
        """
        if not 0 <= boot_ms <= used_ms:
            raise ValueError(f"a lease of {used_ms} ms cannot have booted for {boot_ms} ms")
        if interrupted and used_ms < self.free_if_interrupted_within_s * 1000:
            return 0
        counted = max(used_ms if self.boot else used_ms - boot_ms, self.minimum_s * 1000)
        increment = INCREMENT_MS[self.increment]
        return -(-counted // increment) * increment


class WorkerType(Block):
    """A kind of worker that can be leased."""

    name: ShortText
    usd_per_hour: Dollars
    """Of one worker, with all its GPUs."""

    market: Market = "reserved"
    """`spot`: the provider may end it at any instant."""

    billing: Billing = Billing()

    boot_s: float = Field(0.0, ge=0, le=86_400)
    """Usual time from the start of a lease until the worker is ready: machine, image, weights. For forecasts and advice; a
    bill counts what it took."""

    @property
    def micro_per_hour(self) -> int:
        """Its price in micro-dollars an hour."""
        return int(self.usd_per_hour * MICRO)

    def price(self, ms: int) -> Money:
        """Return the price of so much billed time."""
        return Money.of(micro_per_hour=self.micro_per_hour, ms=ms)
