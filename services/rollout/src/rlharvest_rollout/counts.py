"""What an engine counted, taken into the metrics of the process, which outlive the engine."""

from __future__ import annotations

from rlharvest.engine import EngineStats

from rlharvest_rollout import metrics

_COUNTERS = {
    "prefill_tokens": metrics.PREFILL_TOKENS,
    "prefill_saved_tokens": metrics.PREFILL_SAVED_TOKENS,
    "drafted_tokens": metrics.DRAFTED_TOKENS,
    "accepted_tokens": metrics.ACCEPTED_TOKENS,
}


class EngineCounts:
    """Follows the statistics of one engine."""

    def __init__(self) -> None:
        self._before = EngineStats()

    def update(self, stats: EngineStats) -> None:
        """Count what is new; a statistic that fell means that the engine was started anew."""
        before = self._before
        if any(getattr(stats, name) < getattr(before, name) for name in _COUNTERS):
            before = EngineStats()
        for name, counter in _COUNTERS.items():
            counter.inc(getattr(stats, name) - getattr(before, name))
        if (drafts := stats.drafts - before.drafts) > 0:
            metrics.DRAFT_WINDOW.set((stats.drafted_tokens - before.drafted_tokens) / drafts)
        self._before = stats
