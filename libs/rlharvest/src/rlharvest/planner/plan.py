"""A plan: what trains, what rolls out, what that gives, and what binds it. Plain values, for people and for programs.

Invariant: every figure of a plan is expected, by the cost model; none is measured.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

Bound = Literal["training", "rollout", "transfer"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """Pipeline stages of the trainer, on one kind of machine."""

    machine: str
    tensor_parallel: int
    pipeline_parallel: int
    layers: int


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan:
    """The trainer."""

    stages: tuple[StagePlan, ...]
    data_parallel: int
    machines: Mapping[str, int]
    """Whole machines of each kind that it has; of a single machine that is divided, its GPUs."""
    gpus: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaPlan:
    """Equal rollout workers."""

    machine: str
    tensor_parallel: int
    pipeline_parallel: int
    batch: int
    """Responses that one runs at a time."""
    replicas: int
    tokens_per_s: float
    """Of one."""
    share: float
    """Of all responses, that all of these get."""

    @property
    def gpus(self) -> int:
        """GPUs of all of them."""
        return self.tensor_parallel * self.pipeline_parallel * self.replicas


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """A placement and what it gives."""

    training: TrainingPlan
    rollout: tuple[ReplicaPlan, ...]
    step_s: float
    train_s: float
    rollout_s: float
    pull_s: float
    """Until every machine has the new weights."""
    swap_s: float
    tokens_per_s: float
    """Response tokens of a step, generated and trained, over its time."""
    usd_per_hour: float
    """Of the machines that the plan uses."""
    binds: Bound
    why: str
    unused: Mapping[str, int]
    """Machines of each kind that can be given back."""

    @property
    def usd_per_million_tokens(self) -> float:
        """Dollars for a million response tokens, generated and trained."""
        return self.usd_per_hour / 3600 / self.tokens_per_s * 1e6

    def describe(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {**asdict(self), "usd_per_million_tokens": self.usd_per_million_tokens}


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The answer of the search."""

    best: Plan
    second: Plan | None
    """The best with another set of machines in training; None: there is no other."""
    considered: int
    """Sets of machines to train on."""
    solved: int
    """Of those, how many needed an integer program; bounds ruled out the others."""
    exact: bool
    """Whether no better plan exists, by the cost model; else it is within one part in ten thousand of the best."""

    def describe(self) -> dict[str, Any]:
        """Return it as JSON."""
        return {
            "best": self.best.describe(),
            "second": None if self.second is None else self.second.describe(),
            "considered": self.considered,
            "solved": self.solved,
            "exact": self.exact,
        }
