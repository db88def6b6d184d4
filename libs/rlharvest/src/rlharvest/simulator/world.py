"""One run: the clock, the rollout, the reserved machines, the preemptible ones, the bill.

Invariants (property-tested): the same scenario, strategy and seed give the same outcome; every response of every batch is
generated and trained once; the bill is that of every lease from its start to its end.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from rlharvest.money.amount import Money, milliseconds
from rlharvest.money.meter import Meter
from rlharvest.money.price import WorkerType
from rlharvest.simulator import market
from rlharvest.simulator.clock import Clock
from rlharvest.simulator.fleet import SPOT, Fleet
from rlharvest.simulator.group import Group
from rlharvest.simulator.market import Trace
from rlharvest.simulator.outcome import Outcome, Step
from rlharvest.simulator.rollout import Rollout
from rlharvest.simulator.scenario import Scenario
from rlharvest.simulator.seat import Seat
from rlharvest.simulator.seeding import Alone, Ours, Published, Seeding
from rlharvest.simulator.strategy import NAMED, Strategy
from rlharvest.simulator.timeline import Timeline
from rlharvest.simulator.trainer import RESERVED, Trainer

EVENTS_A_LOOK = 20_000
"""Events between two calls of `progress`."""


class World:
    """A run that can be played."""

    def __init__(self, scenario: Scenario, strategy: Strategy, trace: Trace | None = None) -> None:
        """Set everything up.

        Args:
            trace: of the market; None: the scenario's.

        Raises:
            InvalidField: the trace cannot be read.
        """
        self.scenario, self.strategy = scenario, strategy
        self.clock = Clock()
        self.steps: list[Step] = []
        self._spent: list[Money] = []
        self._wall_s = 0.0
        self._ended_s: float | None = None
        self._holding: set[str] = set()
        self._timeline = Timeline()
        reserved, spot = scenario.reserved, scenario.market
        self._meter = Meter(
            [
                WorkerType(name=RESERVED, usd_per_hour=reserved.usd_per_node_hour, billing=reserved.billing),
                WorkerType(name=SPOT, usd_per_hour=spot.usd_per_hour, market="spot", billing=spot.billing),
            ]
        )
        self.rollout = Rollout(self.clock, scenario, strategy, on_group=self._group, on_busy=self._busy)
        engines = reserved.nodes * (reserved.gpus_per_node // reserved.engine_gpus)
        self.fleet = Fleet(
            self.clock,
            scenario,
            strategy,
            trace if trace is not None else market.of(spot, scenario.seed),
            self.rollout,
            self._meter,
            self._timeline,
            cap=engines,
            on_capacity=self._capacity,
        )
        self.trainer = Trainer(
            self.clock,
            scenario,
            strategy,
            self.rollout,
            self.fleet,
            _seeding(strategy, engines),
            self._timeline,
            on_step=self._step,
        )

    def play(self, progress: Callable[[World], None] | None = None) -> Outcome:
        """Play it to its end.

        Args:
            progress: called now and then, and at the end.
        """
        started = time.perf_counter()
        for n in range(self.scenario.reserved.nodes):
            self._meter.open(f"{RESERVED}-{n}", RESERVED, at_ms=0)
            self._meter.busy(f"{RESERVED}-{n}", at_ms=0, holds_work=True)
        self.fleet.publish(0)
        self.fleet.start()
        self.clock.at(0.0, self.trainer.begin)
        until = self.scenario.max_hours * 3600
        while not self.clock.over and self.clock.next_s <= until:
            self.clock.run(until=until, most_events=EVENTS_A_LOOK)
            if progress is not None:
                progress(self)
        self._wall_s = time.perf_counter() - started
        return self.outcome()

    def outcome(self) -> Outcome:
        """Return what it gave so far."""
        ended = self.clock.now if self._ended_s is None else self._ended_s
        statement = self._meter.statement(now_ms=milliseconds(ended))
        self._timeline.close(ended)
        counts, engines = self.rollout.counts, [seat.engine for seat in self.trainer.seats]
        return Outcome(
            scenario=self.scenario.name,
            strategy=self.strategy.name,
            seed=self.scenario.seed,
            steps=tuple(self.steps),
            spent=tuple(self._spent),
            seconds=ended,
            finished=self._ended_s is not None,
            reserved=statement.bills[RESERVED],
            spot=statement.bills[SPOT],
            lost_instances=self.fleet.lost,
            orphans=counts.orphans,
            moves=counts.moves,
            generated_tokens=counts.generated,
            regenerated_tokens=counts.regenerated,
            prefilled_tokens=self.fleet.prefilled + sum(engine.prefilled for engine in engines),
            weights_gb=self.fleet.sent_gb,
            events=self.clock.events,
            wall_s=self._wall_s,
            stretches=tuple(self._timeline.stretches),
        )

    def _group(self, group: Group) -> None:
        self.trainer.group(group)

    def _busy(self, seat: Seat) -> None:
        """A worker has work now, or has none any more: the bill and the chart say so."""
        if seat.reserved or seat.name not in self._meter.leases:
            return
        holds = seat.held > 0
        if holds == (seat.name in self._holding):
            return
        (self._holding.add if holds else self._holding.discard)(seat.name)
        self._meter.busy(seat.name, at_ms=milliseconds(self.clock.now), holds_work=holds)
        self._timeline.enter(seat.name, "rollout" if holds else "idle", self.clock.now)

    def _capacity(self) -> None:
        self.trainer.look()

    def _step(self, step: Step) -> None:
        self.steps.append(step)
        self._spent.append(self._meter.statement(now_ms=milliseconds(self.clock.now)).total)
        if len(self.steps) == self.scenario.steps:
            self._ended_s = self.clock.now
            self.clock.end()


def run(
    scenario: Scenario, progress: Callable[[World], None] | None = None, *, trace: Trace | None = None
) -> list[Outcome]:
    """Return the outcomes of a scenario's strategies, which all meet the same workload and the same trace.

    Raises:
        InvalidField: the trace cannot be read.
    """
    shared = trace if trace is not None else market.of(scenario.market, scenario.seed)
    return [World(scenario, NAMED[name], shared).play(progress) for name in scenario.strategies]


def _seeding(strategy: Strategy, engines: int) -> Seeding:
    """Return who sets T_seed. Before anything is known, as many instances are worth having as there are reserved engines."""
    if strategy.offload == "none":
        return Alone()
    if strategy.offload == "rlboost":
        return Published(strategy, n_reserved=engines)
    return Ours(strategy, cap=engines)
