"""Whether a plan still holds, and the inventory as measurements correct it.

A plan is made with a cost model; while the job runs, its rates are measured. When they are off by more than `THRESHOLD` for
long enough, another plan may be better: `due` says so, and `corrected` gives the inventory to make it from.

Invariants (property-tested): measurements that agree with the plan are never a reason; what is corrected has no efficiency
outside of (0, 1]; with what was measured as planned it is the inventory itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from rlharvest.planner.inventory import Gpu, Inventory
from rlharvest.planner.plan import Plan

THRESHOLD = 0.2
"""Relative error of a rate from which a plan is in doubt."""

LEAST_STEPS = 3
"""Steps over which measurements are means, at least: lengths differ from step to step."""

LEAST_EFFICIENCY = 0.01
"""What is slower stands still for other reasons."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Means over some steps; what is not there was not measured."""

    steps: int
    train_s: float | None = None
    response_tokens: float | None = None
    tokens_per_s: Mapping[str, float] = field(default_factory=dict)
    """Of all replicas of a kind of machine together, by its name, while they had work."""


def planned_rates(plan: Plan) -> dict[str, float]:
    """Return the tokens a second of all replicas of each kind of machine, as planned."""
    rates: dict[str, float] = {}
    for one in plan.rollout:
        rates[one.machine] = rates.get(one.machine, 0.0) + one.tokens_per_s * one.replicas
    return rates


def due(plan: Plan, measured: Measured, *, response_tokens: float, threshold: float = THRESHOLD) -> str | None:
    """Return why to plan again, for people; None if the plan holds.

    Args:
        response_tokens: mean of a response that the plan was made for.
    """
    if measured.steps < LEAST_STEPS:
        return None
    compared = [("training takes", "s a step", measured.train_s, plan.train_s)]
    compared += [("responses have", "tokens", measured.response_tokens, response_tokens)]
    for name, rate in planned_rates(plan).items():
        compared.append((f"{name} makes", "tokens/s", measured.tokens_per_s.get(name), rate))
    worst, reason = 1.0 + threshold, None
    for what, unit, found, planned in compared:
        if not found or not planned:
            continue
        off = max(found / planned, planned / found)
        if off > worst:
            worst, reason = off, f"{what} {found:,.1f} {unit} where {planned:,.1f} were planned"
    return reason


def corrected(inventory: Inventory, plan: Plan, measured: Measured) -> Inventory:
    """Return the inventory with the efficiencies that were measured, of the types of GPU that were."""
    train = plan.train_s / measured.train_s if measured.train_s else 1.0
    rates = planned_rates(plan)
    ratios: dict[str, list[float]] = {}
    trains: set[str] = set()
    for machine in inventory.machines:
        if machine.name in plan.training.machines:
            trains.add(machine.gpu)
        found = measured.tokens_per_s.get(machine.name)
        if found and rates.get(machine.name):
            ratios.setdefault(machine.gpu, []).append(found / rates[machine.name])
    gpus: dict[str, Gpu] = dict(inventory.gpus)
    for machine in inventory.machines:
        known = inventory.gpu(machine)
        mine = ratios.get(machine.gpu, [])
        changes = {
            "train_efficiency": known.train_efficiency * (train if machine.gpu in trains else 1.0),
            # Kinds that share a type share its efficiency: their mean.
            "decode_efficiency": known.decode_efficiency * (sum(mine) / len(mine) if mine else 1.0),
        }
        changes = {name: min(1.0, max(LEAST_EFFICIENCY, value)) for name, value in changes.items()}
        if any(value != getattr(known, name) for name, value in changes.items()):
            gpus[machine.gpu] = known.model_copy(update=changes)
    return inventory.model_copy(update={"gpus": gpus})
