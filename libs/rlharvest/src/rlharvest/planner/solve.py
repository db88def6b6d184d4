"""The search for the best plan: AReaL-Hex's two phases, made exact.

There are not many sets of machines to train on, and each has a fastest plan; the best rollout beside it is one integer
program. A bound on each program, from relaxing its limits, orders the plans; the bisection on the share of FLOPS gives a
good one to begin with; and the search ends when no bound is better than what it has. AReaL-Hex alternates the two phases
until nothing changes, which may end beside the best.

Invariant (property-tested): no plan of the same space is faster than the first; the second is the best with another
partition.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from rlharvest.errors import InvalidField
from rlharvest.planner import partition, rollout, training
from rlharvest.planner.inventory import Inventory, Machine
from rlharvest.planner.plan import Bound, Plan, ReplicaPlan, Result, StagePlan, TrainingPlan
from rlharvest.planner.rollout import Menu, Replicas
from rlharvest.planner.training import Training
from rlharvest.planner.transfer import Mode, Update, update
from rlharvest.planner.workload import Workload

EXACT_GPUS = 1024
"""Above this a distance of GAP from the optimum will do."""

GAP = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How versions travel, and what a step takes besides."""

    weights: Mode = "delta"
    blocking: bool = False
    """Rollout waits for the transfer, as AReaL-Hex's does; else it goes on and pauses for the swap alone."""
    reward_s: float = 0.0
    """Of a step, beyond rollout."""


@dataclass(slots=True)
class Search:
    """One search."""

    inventory: Inventory
    work: Workload
    options: Options
    menu: Menu
    plans: list[Training]
    unit: Sequence[int]
    gap: float
    solved: dict[tuple[int, ...], tuple[float, Replicas]] = field(default_factory=dict)

    def free(self, plan: Training) -> tuple[int, ...]:
        """Return the GPUs of each kind that a training plan leaves."""
        return tuple(
            machine.count * machine.gpus - units * unit
            for machine, units, unit in zip(self.inventory.machines, plan.units, self.unit, strict=True)
        )

    def rate(self, plan: Training) -> float:
        """Return the greatest rollout rate beside a training plan, tokens a second."""
        free = self.free(plan)
        if free not in self.solved:
            self.solved[free] = self.menu.best(free, gap=self.gap)
        return self.solved[free][0]

    def update(self, plan: Training) -> Update:
        """Return what a version costs beside a training plan, if every machine that is left rolls out."""
        links = self.inventory.links
        machines = self.inventory.machines
        senders = sum(
            math.ceil(units * unit / machine.gpus)
            for machine, units, unit in zip(machines, plan.units, self.unit, strict=True)
        )
        copies = [math.ceil(free / machine.gpus) for machine, free in zip(machines, self.free(plan), strict=True)]
        speeds = [1e9 * (links.same_gb_per_s if units else links.cross_gb_per_s) for units in plan.units]
        return update(
            self.work.shape.weight_bytes, mode=self.options.weights, senders=senders, copies=copies, links=speeds
        )

    def step_s(self, plan: Training, rate: float) -> float:
        """Return the seconds of a step with so many tokens a second of rollout."""
        if rate <= 0:
            return math.inf
        change, generate = self.update(plan), self.work.generated / rate + self.options.reward_s
        waits = change.swap_s + (change.pull_s if self.options.blocking or not self.work.overlaps else 0.0)
        if not self.work.overlaps:
            return plan.seconds + generate + waits
        return max(plan.seconds, generate + waits, change.pull_s)

    def best(self) -> list[tuple[float, Training]]:
        """Return the two best training plans with the step's seconds, the best first; fewer if there are not two."""
        found: dict[tuple[int, ...], tuple[float, Training]] = {}
        for plan in self._start():
            found[plan.units] = (self.step_s(plan, self.rate(plan)), plan)
        bounds = self.menu.bound(np.array([self.free(plan) for plan in self.plans], dtype=np.float64))
        least = [self.step_s(plan, float(bound)) for plan, bound in zip(self.plans, bounds, strict=True)]
        for at in sorted(range(len(least)), key=least.__getitem__):
            plan = self.plans[at]
            known = sorted(value for value, _ in found.values())[:2]
            if math.isinf(least[at]) or (len(known) == 2 and least[at] >= known[1]):
                break
            if plan.units not in found:
                found[plan.units] = (self.step_s(plan, self.rate(plan)), plan)
        ranked = sorted(found.values(), key=lambda pair: (pair[0], sum(pair[1].units)))
        return [pair for pair in ranked[:2] if math.isfinite(pair[0])]

    def _start(self) -> list[Training]:
        """Return the training plans on both sides of the bisection."""
        usage = np.array([plan.units for plan in self.plans])
        kinds = self.inventory.machines
        gpus = [self.inventory.gpu(machine) for machine in kinds]
        most = usage.max(axis=0)
        worth = [gpu.tflops * gpu.train_efficiency / (gpu.hbm_tb_per_s * gpu.decode_efficiency) for gpu in gpus]
        queue = partition.order([int(n) for n in most], worth)

        def fastest(units: partition.Units) -> Training | None:
            fitting = np.flatnonzero((usage <= np.array(units)).all(axis=1))
            return self.plans[fitting[0]] if len(fitting) else None  # They are sorted by time.

        def train_s(units: partition.Units) -> float:
            plan = fastest(units)
            return plan.seconds if plan else math.inf

        def rollout_s(units: partition.Units) -> float:
            plan = fastest(units)
            rate = self.rate(plan) if plan else 1.0
            return self.work.generated / rate if rate else math.inf

        ends = partition.bisect(queue, len(kinds), train_s, rollout_s)
        return [plan for plan in map(fastest, ends) if plan is not None]

    def plan(self, step_s: float, chosen: Training) -> Plan:
        """Return a training plan with the cheapest rollout that does not make the step longer."""
        change = self.update(chosen)
        free = self.free(chosen)
        best_rate, replicas = self.solved[free]
        waits = change.swap_s + (change.pull_s if self.options.blocking or not self.work.overlaps else 0.0)
        slack = step_s - waits - self.options.reward_s - (0.0 if self.work.overlaps else chosen.seconds)
        rate = best_rate
        if self.work.generated / slack < best_rate * (1 - 1e-6):
            rate, replicas = self.menu.cheapest(free, rate=self.work.generated / slack, gap=self.gap)
        machines = self.inventory.machines
        used = [0] * len(machines)
        for one, count in replicas:
            used[one.kind] += one.gpus * count
        held = [
            math.ceil((units * unit + gpus) / machine.gpus)
            for machine, units, unit, gpus in zip(machines, chosen.units, self.unit, used, strict=True)
        ]
        rollout_s = self.work.generated / rate
        binds, why = self._binds(chosen, rollout_s + waits + self.options.reward_s, change, replicas, best_rate)
        return Plan(
            training=TrainingPlan(
                stages=tuple(
                    StagePlan(
                        machine=machines[part.kind].name,
                        tensor_parallel=part.tensor,
                        pipeline_parallel=part.pipeline,
                        layers=part.layers,
                    )
                    for part in chosen.stages
                ),
                data_parallel=chosen.data,
                machines={machine.name: units for machine, units in zip(machines, chosen.units, strict=True) if units},
                gpus=chosen.gpus,
            ),
            rollout=tuple(
                ReplicaPlan(
                    machine=machines[one.kind].name,
                    tensor_parallel=one.tensor,
                    pipeline_parallel=one.pipeline,
                    batch=one.batch,
                    replicas=count,
                    tokens_per_s=one.rate,
                    share=one.rate * count / rate,
                )
                for one, count in replicas
            ),
            step_s=step_s,
            train_s=chosen.seconds,
            rollout_s=rollout_s,
            pull_s=change.pull_s,
            swap_s=change.swap_s,
            tokens_per_s=self.work.generated / step_s,
            usd_per_hour=sum(
                float(machine.usd_per_hour) * machine.availability * count
                for machine, count in zip(machines, held, strict=True)
            ),
            binds=binds,
            why=why,
            unused={
                machine.name: machine.count - count
                for machine, count in zip(machines, held, strict=True)
                if machine.count > count
            },
        )

    def _binds(
        self, chosen: Training, rollout_s: float, change: Update, replicas: Replicas, best_rate: float
    ) -> tuple[Bound, str]:
        """Return what the step waits for, and why that is not faster."""
        running = sum(one.batch * count for one, count in replicas)
        pull_s = 0.0 if self.options.blocking else change.pull_s
        if pull_s > max(chosen.seconds, rollout_s):
            return "transfer", f"new weights take {pull_s:.1f} s to reach every machine; use deltas, or faster links"
        if chosen.seconds >= rollout_s or (not self.work.overlaps and chosen.seconds >= rollout_s / 2):
            return "training", (
                f"training takes {chosen.seconds:.1f} s, rollout {rollout_s:.1f} s; "
                "machines that train well would make the step shorter"
            )
        smallest = min((one.batch for one in self.menu.configurations), default=1)
        if running + smallest > self.work.inflight and best_rate > 0:
            return "rollout", (
                f"all {self.work.inflight} responses that may run at a time do; "
                "a larger max_staleness or more prompts a step would fill the machines"
            )
        return "rollout", (
            f"rollout takes {rollout_s:.1f} s, training {chosen.seconds:.1f} s; "
            "machines with memory bandwidth would make the step shorter"
        )


def solve(inventory: Inventory, work: Workload, options: Options | None = None) -> Result:
    """Return the best plan, and the second best.

    Raises:
        InvalidField: no plan exists; says why and what to add.
        rollout.SolverFailed: HiGHS did not come to an end.
    """
    search = _search(inventory, work, options or Options())
    ranked = search.best()
    if not ranked:
        raise _nothing_left(inventory, search)
    plans = [search.plan(step_s, chosen) for step_s, chosen in ranked]
    return Result(
        best=plans[0],
        second=plans[1] if len(plans) > 1 else None,
        considered=len(search.plans),
        solved=len(search.solved),
        exact=search.gap == 0.0,
    )


def _search(inventory: Inventory, work: Workload, options: Options) -> Search:
    machines = inventory.machines
    single = len(machines) == 1 and machines[0].count == 1
    unit = [1 if single else machine.gpus for machine in machines]
    trainable = [
        training.Kind(
            size=machine.gpus,
            unit=step,
            units=0 if machine.market == "spot" else machine.count * machine.gpus // step,
            flops=inventory.gpu(machine).tflops * 1e12 * inventory.gpu(machine).train_efficiency,
            hbm=inventory.gpu(machine).hbm_gb * 1e9,
            link=machine.link_gb_per_s * 1e9,
        )
        for machine, step in zip(machines, unit, strict=True)
    ]
    menu = rollout.menu([rollout_kind(inventory, machine) for machine in machines], work)
    if not menu.configurations:
        raise InvalidField(
            "machines",
            _names(machines),
            f"none holds the weights ({work.shape.weight_bytes / 1e9:.1f} GB) and one sequence of "
            f"{work.context_tokens:.0f} tokens ({work.context_tokens * work.shape.kv_bytes / 1e9:.2f} GB)",
            "Add machines with more GPU memory, or take a smaller model.",
        )
    if not any(kind.units for kind in trainable):
        raise InvalidField(
            "machines", _names(machines), "all are spot, and spot machines do not train", "Add a reserved machine."
        )
    links = inventory.links
    plans = training.search(trainable, work, same_link=links.same_gb_per_s * 1e9, cross_link=links.cross_gb_per_s * 1e9)
    if not plans:
        memory = sum(kind.units * kind.unit * kind.hbm for kind in trainable)
        raise InvalidField(
            "machines",
            _names(machines),
            f"training does not fit: weights, gradients and optimiser alone take {18 * work.shape.parameters / 1e9:.0f} GB, "
            f"and the reserved GPUs have {memory / 1e9:.0f} GB, of which a micro-batch of "
            f"{max(work.micro_batch_tokens, work.longest):.0f} tokens takes its part",
            "Add reserved machines, lower algorithm.micro_batch_tokens or the length limits, or take a smaller model.",
        )
    return Search(inventory, work, options, menu, plans, unit, 0.0 if inventory.total <= EXACT_GPUS else GAP)


def rollout_kind(inventory: Inventory, machine: Machine) -> rollout.Kind:
    """Return a kind of machine as the rollout program needs it."""
    gpu = inventory.gpu(machine)
    return rollout.Kind(
        size=machine.gpus,
        gpus=machine.gpus * machine.count,
        flops=gpu.tflops * 1e12,
        bandwidth=gpu.hbm_tb_per_s * 1e12 * gpu.decode_efficiency,
        hbm=gpu.hbm_gb * 1e9,
        link=machine.link_gb_per_s * 1e9,
        availability=machine.availability,
        price=float(machine.usd_per_hour) / machine.gpus,
    )


def _nothing_left(inventory: Inventory, search: Search) -> InvalidField:
    smallest = min(search.plans, key=lambda plan: sum(plan.units))
    needs = ", ".join(
        f"{units} of {machine.count if unit > 1 or machine.gpus == 1 else machine.gpus} {machine.name}"
        for machine, units, unit in zip(inventory.machines, smallest.units, search.unit, strict=True)
        if units
    )
    return InvalidField(
        "machines",
        _names(inventory.machines),
        f"training needs at least {needs}, and what is left cannot hold an engine",
        "Add a machine, reserved or spot, for rollout. One GPU that does both in turn needs no plan.",
    )


def _names(machines: Sequence[Machine]) -> str:
    return ", ".join(f"{machine.count} x {machine.gpus} {machine.gpu}" for machine in machines)
