"""Prometheus metrics of the coordinator, read from the live state when they are asked for. docs/metrics.md lists them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import REGISTRY
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from rlharvest_coordinator.core import Core


class LiveCollector(Collector):
    """Jobs, workers and the ledger of one coordinator."""

    def __init__(self, core: Core) -> None:
        self.core = core

    def register(self) -> None:
        """Make /metrics show them."""
        REGISTRY.register(self)

    def collect(self) -> Iterator[Metric]:
        """Return the metrics as they are now."""
        core = self.core
        yield _gauge("rlharvest_leading", "1 where this coordinator leads.", float(core.view.leading))
        yield _gauge("rlharvest_epoch", "Epoch in which this coordinator leads, else 0.", float(core.epoch))
        yield _counter("rlharvest_recoveries", "Times the books were taken from the store.", core.keeper.recoveries)
        sampling = float(core.gateway.sampling)
        yield _gauge("rlharvest_completions", "Responses that are being sampled for clients of the gateway.", sampling)
        ignored = CounterMetricFamily("rlharvest_ignored_messages", "Messages of jobs not open here.", labels=["kind"])
        for kind, n in core.keeper.ignored.items():
            ignored.add_metric([kind], n)
        yield ignored
        corrupt = CounterMetricFamily("rlharvest_corrupt_messages", "Messages that could not be read.", labels=["kind"])
        for kind, n in (
            ("beat", core.roster.corrupt),
            ("events", core.journal.corrupt),
            ("ledger", core.keeper.forged),
        ):
            corrupt.add_metric([kind], n)
        yield corrupt
        workers = GaugeMetricFamily("rlharvest_workers", "Workers by state and job.", labels=["state", "job"])
        states = Counter((worker.state, worker.job or "") for worker in core.view.workers())
        for (state, job), n in states.items():
            workers.add_metric([state, job], n)
        yield workers
        responses = GaugeMetricFamily("rlharvest_responses", "Live responses by state.", labels=["job", "state"])
        totals = CounterMetricFamily("rlharvest_job", "Totals of running jobs.", labels=["job", "counter"])
        for run in list(core.runs.values()):
            if (live := core.view.job(run.id)) is None:
                continue
            for state, n in (("pending", live.pending), ("running", live.running), ("finished", live.finished)):
                responses.add_metric([run.id, state], n)
            for name, value in live.counters.items():
                totals.add_metric([run.id, name], value)
        yield responses
        yield totals


def _gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(name, text, value=value)


def _counter(name: str, text: str, value: float) -> CounterMetricFamily:
    return CounterMetricFamily(name, text, value=value)
