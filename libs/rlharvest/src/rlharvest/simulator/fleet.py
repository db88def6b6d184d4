"""The preemptible instances: leased when there is a place, booted, given weights, taken away, released.

Invariants (property-tested): an instance has a place of the trace for as long as it lives; never more live than the cap and
the market's limit allow to begin; each lease is billed from its start to its end, once.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlharvest.money.amount import milliseconds
from rlharvest.money.meter import Meter
from rlharvest.simulator import hardware
from rlharvest.simulator.clock import Clock, Timer
from rlharvest.simulator.engine import Engine
from rlharvest.simulator.market import Change, Trace
from rlharvest.simulator.network import Link
from rlharvest.simulator.rollout import Rollout
from rlharvest.simulator.scenario import Scenario
from rlharvest.simulator.seat import Seat
from rlharvest.simulator.strategy import Strategy
from rlharvest.simulator.timeline import Timeline

SPOT = "spot"
"""Name of the worker type in the bill, and the kind of its engines."""

SERVE_SHARE = 0.5
"""Share of its link over which a worker serves what it holds to others."""

REFERENCE_BATCH = 64
"""Batch and mean context at which a type's tokens/s are quoted."""


@dataclass(slots=True, eq=False)
class Instance:
    """One lease."""

    seat: Seat
    place: str
    version: int | None = None
    """What it holds."""
    pulling: bool = False
    ready: bool = False
    """It served once, so it counts as capacity."""
    dead: bool = False


class Fleet:
    """All preemptible instances."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        strategy: Strategy,
        trace: Trace,
        rollout: Rollout,
        meter: Meter,
        timeline: Timeline,
        *,
        cap: int,
        on_capacity: Callable[[], None],
    ) -> None:
        self.clock = clock
        self.scenario = scenario
        self.strategy = strategy
        self.instances: dict[str, Instance] = {}
        """By place."""
        self.cap = cap
        self.lost = 0
        """Instances that were taken away."""
        self._trace, self._rollout, self._meter, self._timeline = trace, rollout, meter, timeline
        self._on_capacity = on_capacity
        self._free: set[str] = set()
        self._launched = 0
        self._prefilled = 0
        """By instances that are gone."""
        self._version: int | None = None
        self._link = Link(clock, scenario.network.gbit_s * 1e9 / 8)
        self._speed = hardware.remote_speed(scenario)
        self._bytes = hardware.weights_bytes(scenario.model)
        self._over = 0
        """Steps in a row with more instances than the cap."""
        self._ready_s = 0.0
        """Integral of ready instances over time since `measure`."""
        self._ready_at = 0.0
        self._measured_from = 0.0

    @property
    def capacity(self) -> float:
        """Tokens/s of one instance, as quoted."""
        context = self.scenario.workload.prompt_tokens + self._rollout.mean_tokens / 2
        return self._speed.rate(min(REFERENCE_BATCH, self._speed.batch(context)), context)

    @property
    def ready(self) -> int:
        """Instances that count as capacity."""
        return sum(instance.ready for instance in self.instances.values())

    @property
    def serving(self) -> int:
        """Instances that take work of the newest version."""
        return sum(instance.seat.ready and instance.version == self._version for instance in self.instances.values())

    @property
    def sent_gb(self) -> float:
        """Weights that were sent, 1e9 bytes."""
        return self._link.sent / 1e9

    @property
    def prefilled(self) -> int:
        """Tokens that instances prefilled."""
        return self._prefilled + sum(instance.seat.engine.prefilled for instance in self.instances.values())

    def start(self) -> None:
        """Begin to play the trace."""
        if self.strategy.spot:
            self._play(0, 0.0)

    def measure(self) -> float:
        """Return the mean of ready instances since the last call."""
        self._account()
        seconds = self.clock.now - self._measured_from
        mean = self._ready_s / seconds if seconds > 0 else float(self.ready)
        self._ready_s, self._measured_from = 0.0, self.clock.now
        return mean

    def limit(self, cap: int, *, release: bool) -> None:
        """Set how many instances are worth having; with `release`, let those go that were too many for two steps."""
        self.cap = cap
        self._over = self._over + 1 if len(self.instances) > cap else 0
        if release and self._over >= 2:
            idle_first = sorted(self.instances.values(), key=lambda item: (item.ready, item.seat.held, item.place))
            for instance in idle_first[: len(self.instances) - cap]:
                self._free.add(instance.place)
                self._end(instance, interrupted=False)
            self._over = 0
        self._fill()

    def publish(self, version: int) -> None:
        """There is a new version: everybody pulls it as soon as possible."""
        self._version = version
        self._lend()
        for instance in list(self.instances.values()):
            if instance.version is not None:
                self._pull(instance)

    # --- the trace --------------------------------------------------------------------------------------------------------

    def _play(self, at: int, offset_s: float) -> None:
        """Set the next change of the trace; after its end it starts again."""
        changes = self._trace.changes
        if not changes:
            return
        if at == len(changes):
            self.clock.at(offset_s + self._trace.seconds, lambda: self._again(offset_s + self._trace.seconds))
            return
        self.clock.at(offset_s + changes[at].at_s, lambda: self._change(at, offset_s))

    def _again(self, offset_s: float) -> None:
        begins = {change.place for change in self._trace.changes if change.at_s == 0}
        for place in sorted((self._free | self.instances.keys()) - begins):
            self._apply(Change(0.0, place, False))
        self._play(0, offset_s)

    def _change(self, at: int, offset_s: float) -> None:
        changes = self._trace.changes
        now = changes[at].at_s
        # What happens at one instant is one event: a storm takes all it takes before anybody is replaced.
        while at < len(changes) and changes[at].at_s == now:
            self._apply(changes[at])
            at += 1
        self._fill()
        self._play(at, offset_s)

    def _apply(self, change: Change) -> None:
        if change.up:
            if change.place not in self.instances:
                self._free.add(change.place)
        elif change.place in self.instances:
            self.lost += 1
            self._end(self.instances[change.place], interrupted=True)
        else:
            self._free.discard(change.place)

    def _fill(self) -> None:
        most = math.inf if self.scenario.market.most is None else self.scenario.market.most
        most = min(most, self.cap if self.strategy.cap else math.inf)
        for place in sorted(self._free):
            if len(self.instances) >= most:
                break
            self._free.discard(place)
            self._launch(place)

    # --- one instance -----------------------------------------------------------------------------------------------------

    def _launch(self, place: str) -> None:
        self._launched += 1
        engine = Engine(f"spot-{self._launched:05d}", SPOT, self._speed, preemptible=True)
        engine.at = self.clock.now
        seat = Seat(engine=engine, timer=Timer(self.clock, lambda: self._rollout.settle(seat)), reserved=False)
        instance = Instance(seat=seat, place=place)
        self.instances[place] = instance
        self._rollout.joining += 1
        self._meter.open(seat.name, SPOT, at_ms=milliseconds(self.clock.now))
        self._timeline.enter(seat.name, "boot", self.clock.now)
        self.clock.after(self.scenario.market.boot_s, lambda: self._pull(instance))

    def _pull(self, instance: Instance) -> None:
        """Get the newest version, if it is not on the way."""
        if instance.dead or instance.pulling or self._version is None or instance.version == self._version:
            return
        instance.pulling = True
        version, size = self._version, self._bytes
        if instance.version is not None and self.strategy.deltas:
            behind = version - instance.version
            size = min(size, behind * self.scenario.network.delta_share * self._bytes)
        limit = self.scenario.market.workers.network_gbit_s * 1e9 / 8
        if not instance.ready:
            self._timeline.enter(instance.seat.name, "load", self.clock.now)
        self._link.pull(instance.seat.name, size, limit, lambda: self._pulled(instance, version))

    def _pulled(self, instance: Instance, version: int) -> None:
        load_s = self._bytes / 1e9 / self.scenario.market.workers.load_gb_s
        if instance.seat.held:
            # In flight: its responses stay and go on with the new version after the swap.
            self._rollout.settle(instance.seat)
            instance.seat.engine.stall(load_s)
            self._loaded(instance, version)
            self._rollout.settle(instance.seat)
        else:
            instance.seat.ready = False
            self.clock.after(load_s, lambda: self._loaded(instance, version))

    def _loaded(self, instance: Instance, version: int) -> None:
        if instance.dead:
            return
        instance.pulling = False
        instance.version = instance.seat.version = version
        instance.seat.ready = True
        if not instance.ready:
            self._account()
            instance.ready = True
            self._rollout.joining -= 1
            self._meter.ready(instance.seat.name, at_ms=milliseconds(self.clock.now))
            self._timeline.enter(instance.seat.name, "idle", self.clock.now)
            self._rollout.sit(instance.seat)
        self._lend()
        self._rollout.wake()
        self._on_capacity()
        self._pull(instance)

    def _end(self, instance: Instance, *, interrupted: bool) -> None:
        self._account()
        instance.dead = True
        del self.instances[instance.place]
        name = instance.seat.name
        self._prefilled += instance.seat.engine.prefilled
        self._link.drop(name)
        if instance.ready:
            self._rollout.stand_up(instance.seat, noticed=not interrupted)
        else:
            self._rollout.joining -= 1
        self._meter.close(name, at_ms=milliseconds(self.clock.now), interrupted=interrupted)
        self._timeline.leave(name, self.clock.now)
        self._lend()
        self._on_capacity()

    def _lend(self) -> None:
        """Count who serves the newest version to others."""
        if self.strategy.peers:
            rate = SERVE_SHARE * self.scenario.market.workers.network_gbit_s * 1e9 / 8
            self._link.lend(rate * sum(item.version == self._version for item in self.instances.values()))

    def _account(self) -> None:
        self._ready_s += self.ready * (self.clock.now - self._ready_at)
        self._ready_at = self.clock.now
