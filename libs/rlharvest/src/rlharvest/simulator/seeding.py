"""Who sets T_seed and N_prem from what a step showed: our policy, RLBoost as published, or nobody."""

from __future__ import annotations

import math
from typing import Protocol

from rlharvest.policies import offload
from rlharvest.simulator import rlboost
from rlharvest.simulator.strategy import Strategy


class Seeding(Protocol):
    """The controller of a run."""

    seed_s: float
    """T_seed of the next step; infinite: until everything is done."""
    cap: int | None
    """N_prem of the next step; None: nobody knows."""
    releases: bool
    """Instances beyond the cap are let go, not only not replaced."""

    def learn(
        self, measured: offload.Measured, *, generation_s: float, n_mean: float, n_now: int, capacity: float
    ) -> str:
        """Take a step's measurements in; return the reason for what the next step does.

        Args:
            generation_s: from the start of the step to its last response. n_mean: instances, mean. n_now: at its end.
            capacity: tokens/s of one instance.
        """
        ...

    def reconsider(self, seed_s: float, capacity: float) -> float:
        """Return T_seed of the step that goes on, for the capacity that is there now, tokens/s."""
        ...


class Alone:
    """Reserved engines do it all."""

    def __init__(self) -> None:
        self.seed_s = math.inf
        self.cap: int | None = None
        self.releases = False

    def learn(
        self, measured: offload.Measured, *, generation_s: float, n_mean: float, n_now: int, capacity: float
    ) -> str:
        """Learn nothing."""
        return "reserved workers roll out until everything is done"

    def reconsider(self, seed_s: float, capacity: float) -> float:
        """Change nothing."""
        return seed_s


class Published:
    """RLBoost's controller."""

    def __init__(self, strategy: Strategy, *, n_reserved: int) -> None:
        self._controller = rlboost.Controller(memory=strategy.memory)
        self._n_reserved = n_reserved
        self.seed_s: float = self._controller.seed_s
        self.cap: int | None = n_reserved
        self.releases = False

    def learn(
        self, measured: offload.Measured, *, generation_s: float, n_mean: float, n_now: int, capacity: float
    ) -> str:
        """Adjust T_seed and N_prem by the rules of the paper."""
        before = self.seed_s
        self.cap = rlboost.worth(
            remote_s=measured.remote_s,
            n_mean=n_mean,
            seed_s=min(before, measured.step_s),
            n_reserved=self._n_reserved,
            train_s=measured.train_s,
        )
        self.seed_s = self._controller.adjust(
            generation_s=generation_s,
            step_s=measured.step_s,
            trainer_idle_s=measured.trainer_idle_s,
            n=n_now,
            throughput=measured.tokens / measured.step_s,
        )
        return f"T_seed {before:.0f} -> {self.seed_s:.0f} s with {n_now} instances"

    def reconsider(self, seed_s: float, capacity: float) -> float:
        """Change nothing: as published, T_seed is slept to its end."""
        return seed_s


class Ours:
    """rlharvest.policies.offload."""

    def __init__(self, strategy: Strategy, options: offload.Options | None = None, *, cap: int) -> None:
        self.options = options or offload.Options()
        self._state = offload.State(self.options.initial_s)
        self._memory = strategy.memory
        self.seed_s = self.options.initial_s
        self.cap: int | None = cap
        self.releases = True

    def learn(
        self, measured: offload.Measured, *, generation_s: float, n_mean: float, n_now: int, capacity: float
    ) -> str:
        """Decide by the policy."""
        state = self._state if self._memory else offload.State(self._state.seed_s)
        self._state, decision = offload.decide(state, measured, self.options)
        self.seed_s = decision.seed_s
        if capacity > 0 and decision.worth > 0:
            self.cap = math.ceil(decision.worth / capacity)
        return decision.reason

    def reconsider(self, seed_s: float, capacity: float) -> float:
        """Decide by the policy."""
        return offload.reconsider(self._state, seed_s, capacity, self.options)
