"""How a run is conducted: which of the mechanisms are on. The named strategies, and what ablations switch off."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rlharvest.simulator.scenario import StrategyName


@dataclass(frozen=True, slots=True, kw_only=True)
class Strategy:
    """One way to conduct a run."""

    name: str
    spot: bool = True
    """Use preemptible instances."""
    streaming: bool = True
    """The trainer starts on micro-batches while the rest is generated; otherwise on the whole batch."""
    offload: Literal["none", "rlboost", "rlharvest"] = "rlharvest"
    """Who sets T_seed; `none`: reserved workers roll out until everything is done."""
    seeding: bool = True
    """Reserved workers roll out at all while there are preemptible ones."""
    memory: bool = True
    """The controller remembers what balanced a capacity."""
    keep_tokens: bool = True
    """A response goes on where it was; otherwise it starts anew when its owner dies."""
    balance: Literal["none", "rlboost", "rlharvest"] = "rlharvest"
    """Who moves responses between workers."""
    groups_per_poll: int | None = None
    """Groups that are dispatched in a second; None: as many as there is room for."""
    static: bool = False
    """Responses are divided evenly at the start of a step, whatever an engine can run at a time."""
    deltas: bool = True
    """Workers that have the version before pull a delta."""
    peers: bool = True
    """Workers serve what they hold to others."""
    interruptible: bool = True
    """Seeding ends early when there is no need for it any more, and starts again when there is."""
    cap: bool = True
    """Lease no more instances than are worth having (N_prem)."""


NAMED: dict[StrategyName, Strategy] = {
    "reserved": Strategy(name="reserved", spot=False, offload="none", deltas=False, peers=False),
    "colocated": Strategy(
        name="colocated",
        spot=False,
        streaming=False,
        offload="none",
        balance="none",
        static=True,
        deltas=False,
        peers=False,
    ),
    "rlboost": Strategy(
        name="rlboost",
        offload="rlboost",
        balance="rlboost",
        groups_per_poll=4,
        deltas=False,
        peers=False,
        interruptible=False,
    ),
    "rlharvest": Strategy(name="rlharvest"),
}
"""`reserved`: our policies without preemptible workers. `colocated`: as veRL does, rollout and training in turn, responses
divided evenly. `rlboost`: as published, with the constants of its open code (rlboost.py). `rlharvest`: everything."""
