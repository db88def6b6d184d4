"""Whether a run may go on: it pauses before its budget is exceeded, not after.

The check looks ahead. A run that is told to pause needs a while to stop, and nobody looks between two checks; what every
open lease will have cost by then, increments and minimums included, must still be within the budget.

Invariant (property-tested): if checks come no later than `next_check_ms` apart, every lease ends within `stop_ms` of the
verdict to pause, and leases begin only where `affords` says so, the bill never exceeds the budget.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rlharvest.money.amount import NOTHING, Money
from rlharvest.money.meter import Meter
from rlharvest.money.price import WorkerType


@dataclass(frozen=True, slots=True)
class Verdict:
    """The answer of a check."""

    pause: bool
    spent: Money
    """If every lease ended now."""
    committed: Money
    """If every lease ended at the last moment before a later check could stop it."""
    limit: Money

    @property
    def reason(self) -> str:
        """Why, for people."""
        spent = f"{self.spent} of {self.limit} are spent"
        if self.pause:
            return f"{spent}, and {self.committed} would be before a later check could stop it"
        return f"{spent}; {self.committed} by the time that the next check could stop it"


def check(meter: Meter, limit: Money, *, now_ms: int, next_check_ms: int, stop_ms: int) -> Verdict:
    """Return whether to pause now.

    Args:
        next_check_ms: longest time until the next check.
        stop_ms: longest time from a verdict to pause to the end of the last lease: drain, last checkpoint, release.
    """
    committed = meter.committed(now_ms=now_ms, ahead_ms=next_check_ms + stop_ms)
    return Verdict(committed > limit, meter.statement(now_ms=now_ms).total, committed, limit)


def affords(
    meter: Meter, kinds: Iterable[WorkerType], limit: Money, *, now_ms: int, next_check_ms: int, stop_ms: int
) -> bool:
    """Return whether workers of these types may be leased besides, now, without a pause at once."""
    ahead = next_check_ms + stop_ms
    more = sum((kind.price(kind.billing.billed_ms(used_ms=max(1, ahead))) for kind in kinds), NOTHING)
    return meter.committed(now_ms=now_ms, ahead_ms=ahead) + more <= limit
