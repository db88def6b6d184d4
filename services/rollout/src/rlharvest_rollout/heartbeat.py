"""What a heartbeat says of the job in hand, and how fast tokens come."""

from __future__ import annotations

from rlharvest.v1 import fleet_pb2

from rlharvest_rollout import metrics
from rlharvest_rollout.session import Session

_LEAST_S = 0.2
_SMOOTHED_OVER_S = 3.0


class Rate:
    """Tokens a second, smoothed over a few heartbeats."""

    def __init__(self) -> None:
        self._at = 0.0
        self._count = 0
        self._smooth = 0.0

    def update(self, now: float, count: int) -> float:
        """Return the rate, given the tokens counted by now, which only a new incarnation lowers."""
        elapsed = now - self._at
        if count < self._count or not self._at:
            self._at, self._count, self._smooth = now, count, 0.0
        elif elapsed >= _LEAST_S:
            weight = min(1.0, elapsed / _SMOOTHED_OVER_S)
            self._smooth += weight * ((count - self._count) / elapsed - self._smooth)
            self._at, self._count = now, count
        return self._smooth


def describe(session: Session, beat: fleet_pb2.Heartbeat) -> None:
    """Fill in the job, its version, and what is held of it."""
    held = session.buffer.held()
    stats = session.engine.stats()
    session.counts.update(stats)
    beat.job = session.target.job
    if session.engine.version is not None:
        beat.version = session.engine.version
    beat.held.extend(one.handle for one in held)
    beat.held_attempt.extend(one.attempt for one in held)
    beat.held_length.extend(one.length for one in held)
    beat.flushed = session.publisher.flushed
    beat.prefill_tokens = stats.prefill_tokens
    beat.prefill_saved_tokens = stats.prefill_saved_tokens
    metrics.HELD.set(len(held))
