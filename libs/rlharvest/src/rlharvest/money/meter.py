"""The bill of a whole run, kept as workers come, work and go.

Invariants (property-tested): at any time it is the sum of the bills of all leases; events out of order are refused; what a
closed lease cost never changes; an event costs the same however many leases there were.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from rlharvest.money.amount import HOUR_MS, NOTHING, Money
from rlharvest.money.lease import Bill, Lease, bill
from rlharvest.money.price import Market, WorkerType


@dataclass(frozen=True, slots=True)
class Statement:
    """The bills of a run at one time, by worker type."""

    bills: Mapping[str, Bill]
    markets: Mapping[str, Market]

    @property
    def total(self) -> Money:
        """Everything."""
        return self.whole.total

    @property
    def whole(self) -> Bill:
        """Everything, by what the time went to."""
        return sum(self.bills.values(), Bill())

    def of(self, market: Market) -> Money:
        """Return what the workers of one market cost."""
        return sum((one.total for name, one in self.bills.items() if self.markets[name] == market), NOTHING)


class Meter:
    """Bills leases. Times are milliseconds of one clock, and never run back for one worker."""

    def __init__(self, types: Iterable[WorkerType]) -> None:
        self.types = {kind.name: kind for kind in types}
        self._closed = {name: Bill() for name in self.types}
        self._open: dict[str, tuple[str, Lease]] = {}
        self._since: dict[str, int] = {}
        """Of the workers that hold work: since when."""

    @property
    def leases(self) -> Mapping[str, tuple[str, Lease]]:
        """Type and lease of the workers that are paid now. The time busy since the last change is not in them yet."""
        return self._open

    def open(self, worker: str, kind: str, *, at_ms: int) -> None:
        """Begin a lease.

        Raises:
            ValueError: the worker has one, or there is no such type.
        """
        if worker in self._open:
            raise ValueError(f"{worker} is leased already")
        if kind not in self.types:
            raise ValueError(f"there is no worker type {kind!r}; known: {', '.join(self.types)}")
        self._open[worker] = (kind, Lease(start_ms=at_ms))

    def ready(self, worker: str, *, at_ms: int) -> None:
        """Note that a worker can work from now on."""
        kind, lease = self._lease(worker, at_ms)
        if lease.ready_ms is None:
            self._open[worker] = (kind, replace(lease, ready_ms=at_ms))

    def busy(self, worker: str, *, at_ms: int, holds_work: bool) -> None:
        """Note that a worker has work from now on, or has none. One that has work is ready."""
        self.ready(worker, at_ms=at_ms)
        self._settle(worker, at_ms)
        if holds_work:
            self._since[worker] = at_ms

    def close(self, worker: str, *, at_ms: int, interrupted: bool = False) -> Bill:
        """End a lease; return its bill. `interrupted`: its provider ended it."""
        self._lease(worker, at_ms)
        self._settle(worker, at_ms)
        kind, lease = self._open.pop(worker)
        done = bill(replace(lease, end_ms=at_ms, interrupted=interrupted), self.types[kind], now_ms=at_ms)
        self._closed[kind] += done
        return done

    def statement(self, *, now_ms: int) -> Statement:
        """Return all bills as they are if every open lease ends now."""
        bills = dict(self._closed)
        for worker, (kind, lease) in self._open.items():
            since = self._since.get(worker)
            if since is not None:
                lease = replace(lease, busy_ms=lease.busy_ms + now_ms - since)
            bills[kind] += bill(lease, self.types[kind], now_ms=now_ms)
        return Statement(bills, {name: kind.market for name, kind in self.types.items()})

    def committed(self, *, now_ms: int, ahead_ms: int = 0) -> Money:
        """Return the most that everything costs if every open lease ends so long from now, and none begins."""
        total = sum((one.total for one in self._closed.values()), NOTHING)
        for kind, lease in self._open.values():
            # Where booting is not billed, a worker that is not ready yet may be so at once.
            boot = (now_ms if lease.ready_ms is None else lease.ready_ms) - lease.start_ms
            rule = self.types[kind].billing
            total += self.types[kind].price(rule.billed_ms(used_ms=now_ms + ahead_ms - lease.start_ms, boot_ms=boot))
        return total

    def per_hour(self) -> Money:
        """Return the price of an hour of all that is leased now."""
        return sum((self.types[kind].price(HOUR_MS) for kind, _ in self._open.values()), NOTHING)

    def _lease(self, worker: str, at_ms: int) -> tuple[str, Lease]:
        if worker not in self._open:
            raise ValueError(f"{worker} has no lease")
        kind, lease = self._open[worker]
        newest = max(lease.start_ms, lease.ready_ms or lease.start_ms, self._since.get(worker, lease.start_ms))
        if at_ms < newest:
            raise ValueError(f"{worker}: {at_ms} ms is before {newest} ms, which was noted already")
        return kind, lease

    def _settle(self, worker: str, at_ms: int) -> None:
        since = self._since.pop(worker, None)
        if since is not None:
            kind, lease = self._open[worker]
            self._open[worker] = (kind, replace(lease, busy_ms=lease.busy_ms + at_ms - since))
