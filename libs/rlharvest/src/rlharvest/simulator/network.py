"""The link over which workers pull weights: everybody gets an equal share, nobody more than its own link takes.

Invariants (property-tested): the shares never add up to more than the link; a transfer never beats its own link; bytes that
were asked for arrive, once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlharvest.simulator.clock import Clock, Timer


@dataclass(slots=True)
class _Flow:
    left: float
    """Bytes."""
    limit: float
    """Bytes/s of the receiver."""
    done: Callable[[], None]
    rate: float = 0.0


class Link:
    """One sender, or all that send together."""

    def __init__(self, clock: Clock, bytes_per_s: float) -> None:
        self._clock = clock
        self._base = bytes_per_s
        self._more = 0.0
        self._at = 0.0
        self._flows: dict[str, _Flow] = {}
        self._timer = Timer(clock, self._arrive)
        self.sent = 0.0
        """Bytes that arrived or are on their way."""

    def pull(self, worker: str, size: float, limit: float, done: Callable[[], None]) -> None:
        """Start a transfer of `size` bytes; what the worker pulled before is given up."""
        self._advance()
        self._flows[worker] = _Flow(size, limit, done)
        self.sent += size
        self._share()

    def drop(self, worker: str) -> None:
        """Give a transfer up."""
        if worker in self._flows:
            self._advance()
            del self._flows[worker]
            self._share()

    def lend(self, bytes_per_s: float) -> None:
        """Workers that have the newest version send as well, so much together."""
        self._advance()
        self._more = bytes_per_s
        self._share()

    def rates(self) -> dict[str, float]:
        """Return the bytes/s of each transfer now."""
        return {worker: flow.rate for worker, flow in self._flows.items()}

    def _advance(self) -> None:
        seconds = self._clock.now - self._at
        self._at = self._clock.now
        for flow in self._flows.values():
            flow.left -= flow.rate * seconds

    def _share(self) -> None:
        """Divide the link, the most modest first; set the timer for who is done first."""
        room, waiting = self._base + self._more, len(self._flows)
        for flow in sorted(self._flows.values(), key=lambda flow: flow.limit):
            flow.rate = min(flow.limit, room / waiting)
            room -= flow.rate
            waiting -= 1
        if self._flows:
            soonest = min(max(0.0, flow.left) / flow.rate for flow in self._flows.values())
            self._timer.at(self._clock.now + soonest)
        else:
            self._timer.cancel()

    def _arrive(self) -> None:
        self._advance()
        # Transfers that end within a millisecond of one another end together: a fleet that started at once is one event.
        ended = [worker for worker, flow in self._flows.items() if flow.left <= flow.rate * 1e-3]
        finished = [self._flows.pop(worker) for worker in ended]
        self._share()
        for flow in finished:
            flow.done()
