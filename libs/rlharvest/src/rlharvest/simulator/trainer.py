"""The reserved machines through a step: seed, sleep, train micro-batch by micro-batch, publish.

The trainer and the reserved engines share their GPUs, so one of them has them at a time. At the start of a step the engines
roll out; when the policy says that seeding is over they sleep and what they had goes on elsewhere; the trainer then takes
whole groups as they get ready, micro-batch by micro-batch, and waits where there are too few. After the last one it steps,
publishes, and the controller is told what was measured.

Invariants (property-tested): every group is trained once, in the batch of its rank; the trainer never computes while engines
are awake; times of a step add up to its length.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from rlharvest.policies import batching, offload
from rlharvest.simulator import hardware
from rlharvest.simulator.clock import Clock, Timer
from rlharvest.simulator.engine import Engine
from rlharvest.simulator.fleet import Fleet
from rlharvest.simulator.group import Group
from rlharvest.simulator.outcome import Step
from rlharvest.simulator.rollout import Rollout
from rlharvest.simulator.scenario import Scenario
from rlharvest.simulator.seat import Seat
from rlharvest.simulator.seeding import Seeding
from rlharvest.simulator.strategy import Strategy
from rlharvest.simulator.timeline import Timeline

RESERVED = "reserved"
"""Name of the machines in the bill, and the kind of their engines."""

LOOK_S = 1.0
"""Time between two looks at whether seeding is over."""

HELP_LOOK_S = 5.0
"""Time between two looks at whether engines that sleep should help."""

Device = Literal["rollout", "switch", "train"]


@dataclass(slots=True)
class _Now:
    """The step that is going on."""

    start_s: float
    generated: int
    seeded_s: float = 0.0
    awake_s: float | None = None
    """Since when the engines are awake; None: they are not."""
    train_s: float = 0.0
    idle_s: float = 0.0
    idle_from: float | None = None
    trained: int = 0
    tokens: int = 0
    seed_s: float = 0.0
    switches: int = 0


class Trainer:
    """The reserved machines."""

    def __init__(
        self,
        clock: Clock,
        scenario: Scenario,
        strategy: Strategy,
        rollout: Rollout,
        fleet: Fleet,
        seeding: Seeding,
        timeline: Timeline,
        *,
        on_step: Callable[[Step], None],
    ) -> None:
        self.clock = clock
        self.scenario = scenario
        self.strategy = strategy
        self.step = 0
        """Optimizer steps done."""
        self._rollout, self._fleet, self._seeding, self._timeline = rollout, fleet, seeding, timeline
        self._on_step = on_step
        spec = scenario.workload
        self._size = spec.prompts_per_step
        whole = max(1, scenario.training.micro_batch // spec.num_generations)
        self._micro = whole if strategy.streaming else self._size
        self._token_s = hardware.train_token_s(scenario)
        self._accepted: dict[int, Group] = {}
        """Complete groups that no batch has, by ordinal."""
        self._committed: list[Group] = []
        """Groups of the open batch that wait for the trainer."""
        self._taken = 0
        """Groups of the open batch that were committed."""
        self._device: Device = "train"
        self._busy = False
        self._now = _Now(0.0, 0)
        self._look = Timer(clock, self.look)
        self._help = Timer(clock, self._consider_help)
        self.seats = self._make_seats()
        self._capacity = sum(seat.engine.speed.rate(self._batch(seat), self._context) for seat in self.seats)

    def begin(self) -> None:
        """Start a step: admit what may start, and seed if that is what the policy says."""
        self._now = _Now(self.clock.now, self._rollout.counts.generated, seed_s=self._seeding.seed_s)
        self._taken = 0
        self._rollout.admit(self.step)
        self._commit()
        alone = self._fleet.serving == 0 and self._fleet.ready == 0
        seeds = self.strategy.seeding and self._seeding.seed_s > 0 and self._unfinished > 0
        if alone or seeds:
            self._wake(self._seeding.seed_s)
        else:
            self._train()

    def group(self, group: Group) -> None:
        """A group is complete."""
        self._accepted[group.ordinal] = group
        self._commit()
        if self._device == "rollout":
            if not self._unfinished:
                self.look()
        else:
            self._pump()

    def look(self) -> None:
        """See whether the reserved engines should sleep now."""
        now = self._now
        if self._device != "rollout" or now.awake_s is None:
            return
        elapsed = self.clock.now - now.awake_s
        remote = self._fleet.serving * self._fleet.capacity if self.strategy.spot else 0.0
        unfinished = self._unfinished
        if not self.strategy.interruptible and not unfinished and remote > 0 and elapsed < now.seed_s - 0.01:
            # As published, the sleep of T_seed is slept to its end.
            self._look.at(now.awake_s + now.seed_s)
            return
        seed_s = self._seeding.reconsider(now.seed_s, remote) if self.strategy.interruptible else now.seed_s
        reason = offload.seeding_over(elapsed_s=elapsed, seed_s=seed_s, unfinished=unfinished, remote_capacity=remote)
        if reason is None:
            left = seed_s - elapsed
            self._look.at(self.clock.now + (left if 0.01 < left < LOOK_S else LOOK_S))
        else:
            self._sleep()

    # --- the devices ------------------------------------------------------------------------------------------------------

    def _wake(self, seed_s: float) -> None:
        self._set_device("switch")
        self._now.seed_s = seed_s
        self._now.switches += 1
        self.clock.after(self.scenario.reserved.wake_s, self._awake)

    def _awake(self) -> None:
        self._set_device("rollout")
        self._now.awake_s = self.clock.now
        for seat in self.seats:
            seat.engine.at = self.clock.now
            seat.version = self.step
            seat.ready = True
            self._rollout.sit(seat)
        self._rollout.wake()
        self._look.at(self.clock.now + LOOK_S)

    def _sleep(self) -> None:
        """Put the engines to sleep: their responses go on elsewhere."""
        assert self._now.awake_s is not None
        self._now.seeded_s += self.clock.now - self._now.awake_s
        self._now.awake_s = None
        self._look.cancel()
        self._set_device("switch")
        for seat in self.seats:
            self._rollout.stand_up(seat, noticed=True)
            del self._rollout.seats[seat.name]
        self.clock.after(self.scenario.reserved.sleep_s, self._train)

    def _train(self) -> None:
        self._set_device("train")
        self._pump()

    def _set_device(self, device: Device) -> None:
        self._idle(False)
        self._device = device
        self._timeline.enter("trainer", "wait" if device == "train" else device, self.clock.now)

    # --- the batch --------------------------------------------------------------------------------------------------------

    @property
    def _unfinished(self) -> int:
        """Groups of the open batch that are not complete."""
        return self._size - self._taken

    def _commit(self) -> None:
        """Put complete groups into the open batch."""
        first = self.step * self._size
        batch = range(first, first + self._size)
        running = [ordinal for ordinal in batch if ordinal in self._rollout.groups]
        accepted = [ordinal for ordinal in batch if ordinal in self._accepted]
        for ordinal in batching.commit(running=running, accepted=accepted, committed=self._taken, size=self._size):
            self._committed.append(self._accepted.pop(ordinal))
            self._taken += 1

    def _pump(self) -> None:
        """Train a micro-batch if there is one."""
        if self._device != "train" or self._busy:
            return
        last = not self._unfinished
        if not self._committed or (len(self._committed) < self._micro and not last):
            self._idle(True)
            return
        self._idle(False)
        taken, self._committed = self._committed[: self._micro], self._committed[self._micro :]
        tokens = sum(group.tokens for group in taken)
        seconds = tokens * self._token_s
        self._busy = True
        self._now.train_s += seconds
        self._now.trained += len(taken)
        self._now.tokens += tokens
        self._timeline.enter("trainer", "train", self.clock.now)
        self.clock.after(seconds, self._trained)

    def _trained(self) -> None:
        self._busy = False
        self._timeline.enter("trainer", "wait", self.clock.now)
        if self._now.trained < self._size:
            self._pump()
            return
        training = self.scenario.training
        self._now.train_s += training.optimizer_s
        self._busy = True
        self.clock.after(training.optimizer_s + training.publish_s, self._publish)

    def _publish(self) -> None:
        self._busy = False
        self._idle(False)
        now, clock, rollout, fleet = self._now, self.clock, self._rollout, self._fleet
        n_mean = fleet.measure()
        step_s = clock.now - now.start_s
        last_remote = min(clock.now, max(now.start_s, rollout.last_remote_s))
        measured = offload.Measured(
            step_s=step_s,
            seeded_s=now.seeded_s,
            trainer_idle_s=now.idle_s,
            remote_idle_s=clock.now - last_remote if self._ahead == 0 else 0.0,
            train_s=now.train_s,
            remote_s=last_remote - now.start_s,
            reserved_capacity=self._capacity,
            remote_capacity=n_mean * fleet.capacity,
            next_capacity=fleet.ready * fleet.capacity,
            tokens=rollout.counts.generated - now.generated,
            switch_s=self.scenario.reserved.wake_s + self.scenario.reserved.sleep_s,
        )
        generation_s = max(0.0, rollout.last_finish_s - now.start_s)
        asked = self._seeding.seed_s
        reason = self._seeding.learn(
            measured, generation_s=generation_s, n_mean=n_mean, n_now=fleet.ready, capacity=fleet.capacity
        )
        step = Step(
            step=self.step,
            start_s=now.start_s,
            end_s=clock.now,
            tokens=now.tokens,
            seed_asked_s=asked,
            seeded_s=now.seeded_s,
            train_s=now.train_s,
            trainer_idle_s=now.idle_s,
            remote_idle_s=measured.remote_idle_s,
            generation_s=generation_s,
            instances=n_mean,
            reason=reason,
        )
        self.step += 1
        if self._seeding.cap is not None:
            fleet.limit(self._seeding.cap, release=self._seeding.releases)
        fleet.publish(self.step)
        self._on_step(step)
        if self.step < self.scenario.steps:
            self.begin()

    @property
    def _ahead(self) -> int:
        """Responses of later batches that are generated already."""
        return len(self._rollout.live)

    def _idle(self, idle: bool) -> None:
        """Account for the trainer's waiting."""
        now = self._now
        if now.idle_from is not None:
            now.idle_s += self.clock.now - now.idle_from
            now.idle_from = None
        if idle and not self._busy:
            now.idle_from = self.clock.now
            self._help.at(self.clock.now + HELP_LOOK_S)
        else:
            self._help.cancel()

    def _consider_help(self) -> None:
        """The trainer has waited: see whether engines that sleep should help."""
        if self._device != "train" or self._busy:
            return
        # Those that load the newest version count: they serve in a moment.
        remote = self._fleet.ready * self._fleet.capacity
        remaining = self._rollout.remaining_tokens(self.step)
        reserved = self.scenario.reserved
        useful = (self.strategy.interruptible and self.strategy.seeding) or remote <= 0
        if useful and offload.wake(
            remaining_tokens=remaining,
            remote_capacity=remote,
            reserved_capacity=self._capacity,
            switch_s=reserved.wake_s + reserved.sleep_s,
            trainable=len(self._committed) >= self._micro,
        ):
            self._wake(remaining / (remote + self._capacity) if remote > 0 else math.inf)
            return
        self._help.at(self.clock.now + HELP_LOOK_S)

    # --- the engines ------------------------------------------------------------------------------------------------------

    @property
    def _context(self) -> float:
        spec = self.scenario.workload
        return spec.prompt_tokens + spec.median_tokens / 2

    def _batch(self, seat: Seat) -> int:
        return min(64, seat.engine.speed.batch(self._context))

    def _make_seats(self) -> list[Seat]:
        kind = self.scenario.reserved
        speed = hardware.reserved_speed(self.scenario)
        engines = kind.nodes * (kind.gpus_per_node // kind.engine_gpus)
        names = [f"{RESERVED}-{n:03d}" for n in range(engines)]
        return [self._make_seat(Engine(name, RESERVED, speed, preemptible=False)) for name in names]

    def _make_seat(self, engine: Engine) -> Seat:
        seat = Seat(engine=engine, timer=Timer(self.clock, lambda: self._rollout.settle(seat)), reserved=True)
        return seat
