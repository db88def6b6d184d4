"""The metrics of a worker add up what its engines counted."""

from __future__ import annotations

from prometheus_client import Counter
from rlharvest.engine import EngineStats
from rlharvest_rollout import metrics
from rlharvest_rollout.counts import EngineCounts


def total(counter: Counter) -> float:
    (family,) = counter.collect()
    return next(sample.value for sample in family.samples if sample.name.endswith("_total"))


def test_counters_go_on_when_an_engine_starts_anew() -> None:
    before = {counter: total(counter) for counter in (metrics.PREFILL_TOKENS, metrics.PREFILL_SAVED_TOKENS)}
    counts = EngineCounts()
    counts.update(EngineStats(prefill_tokens=10, prefill_saved_tokens=5, drafts=2, drafted_tokens=6))
    counts.update(EngineStats(prefill_tokens=12, prefill_saved_tokens=9, drafts=2, drafted_tokens=6))
    counts.update(EngineStats(prefill_tokens=3, prefill_saved_tokens=20))
    assert total(metrics.PREFILL_TOKENS) - before[metrics.PREFILL_TOKENS] == 12 + 3
    assert total(metrics.PREFILL_SAVED_TOKENS) - before[metrics.PREFILL_SAVED_TOKENS] == 9 + 20
