"""One lease of one worker, and its bill.

Invariants (property-tested): the parts of a bill add up to its total exactly; a bill never falls as a lease goes on; it is
never below the price of the time that its rule counts.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlharvest.money.amount import NOTHING, Money
from rlharvest.money.price import WorkerType


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The time for which a worker is paid. Times are milliseconds of one clock."""

    start_ms: int
    ready_ms: int | None = None
    """When it could begin to work; None: it never could."""
    end_ms: int | None = None
    """None: it goes on."""
    busy_ms: int = 0
    """Of the time since `ready_ms`, how long it held work."""
    interrupted: bool = False
    """Its provider ended it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bill:
    """What leases cost, by what the time went to."""

    busy: Money = NOTHING
    boot: Money = NOTHING
    idle: Money = NOTHING
    """Ready, and without work."""
    unused: Money = NOTHING
    """Billed beyond the time that it was there: increments and minimums."""
    billed_ms: int = 0

    @property
    def total(self) -> Money:
        """All of it."""
        return self.busy + self.boot + self.idle + self.unused

    def __add__(self, other: Bill) -> Bill:
        return Bill(
            busy=self.busy + other.busy,
            boot=self.boot + other.boot,
            idle=self.idle + other.idle,
            unused=self.unused + other.unused,
            billed_ms=self.billed_ms + other.billed_ms,
        )


def bill(lease: Lease, kind: WorkerType, *, now_ms: int) -> Bill:
    """Return what a lease costs if it ends now, or did cost.

    Raises:
        ValueError: its times are not in order.
    """
    end = now_ms if lease.end_ms is None else lease.end_ms
    ready = end if lease.ready_ms is None else min(lease.ready_ms, end)
    if not lease.start_ms <= ready <= end or not 0 <= lease.busy_ms <= end - ready:
        raise ValueError(f"the times of {lease} are not in order at {now_ms} ms")
    used, boot = end - lease.start_ms, ready - lease.start_ms
    billed = kind.billing.billed_ms(used_ms=used, boot_ms=boot, interrupted=lease.interrupted)
    if billed == 0:
        return Bill()
    paid_boot = boot if kind.billing.boot else 0
    return Bill(
        busy=kind.price(lease.busy_ms),
        boot=kind.price(paid_boot),
        idle=kind.price(end - ready - lease.busy_ms),
        unused=kind.price(billed - paid_boot - (end - ready)),
        billed_ms=billed,
    )
