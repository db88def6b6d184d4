"""RLBoost as published (arXiv 2510.19225): what rlharvest is compared with.

T_seed follows the rules of its open code (PolyRL 836120a, rollout-manager/src/balance.rs) with their constants: whole
seconds, a floor of 5 s, a third of the imbalance, a memory keyed by the number of instances. The table that its code is
preset with for one model is left out. N_prem and the migration of running responses, which the paper has and the code has
not, are as in the paper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlharvest.policies.balance import Load, Move

INITIAL_S = 150
FLOOR_S = 5
DIVISOR = 3
STABLE, CHANGED = 0.8, 0.2
"""Weights of the newest value in the memory, while the number of instances stays and when it has changed."""


class Controller:
    """T_seed and N_prem of a job."""

    def __init__(self, *, memory: bool = True, initial_s: int = INITIAL_S) -> None:
        self.seed_s = initial_s
        self._peak_s = initial_s
        self._memory: dict[int, int] = {}
        self._use_memory = memory
        self._last_n: int | None = None
        self._last_throughput = 0.0

    def adjust(self, *, generation_s: float, step_s: float, trainer_idle_s: float, n: int, throughput: float) -> int:
        """Return T_seed of the next step, s.

        Args:
            generation_s: from the start of the step to the last response. trainer_idle_s: the trainer waited so long.
            n: instances at the end of the step. throughput: tokens/s of the step.
        """
        if self._last_n is not None and n != self._last_n:
            self._last_throughput = 0.0
            self._remember(self._last_n, CHANGED)
            if self._use_memory and n in self._memory:
                self._last_n = n
                self.seed_s = self._peak_s = self._memory[n]
                return self.seed_s
        else:
            if throughput <= self._last_throughput:
                self._remember(n, STABLE)
            else:
                self._peak_s = self.seed_s
            self._last_throughput = throughput
        remote_idle, trainer_idle = int(max(0.0, step_s - generation_s)), int(trainer_idle_s)
        if trainer_idle < remote_idle:
            self.seed_s = max(FLOOR_S, self.seed_s - (remote_idle - trainer_idle) // DIVISOR)
        else:
            self.seed_s += (trainer_idle - remote_idle) // DIVISOR
        self._last_n = n
        return self.seed_s

    def _remember(self, n: int, weight: float) -> None:
        before = self._memory.get(n, self._peak_s)
        self._memory[n] = round((1 - weight) * before + weight * self._peak_s)


def worth(*, remote_s: float, n_mean: float, seed_s: float, n_reserved: int, train_s: float) -> int:
    """Return N_prem, the instances whose work together with the seeding fills one training."""
    return math.ceil((remote_s * n_mean + seed_s * n_reserved) / train_s) if train_s > 0 else n_reserved


def moves(loads: Sequence[Load], plateaus: dict[str, int | None]) -> list[Move]:
    """Return what algorithm 2 moves: pending ones to who has none, else running ones above the plateau to who is idle.

    Args:
        plateaus: kind of worker -> batch size of its plateau; None: not known yet, nothing that runs moves.
    """
    hungry = [load for load in loads if not load.pending and load.running < load.slots and not load.full]
    waiting = {load.worker: load.pending for load in loads if load.pending}
    if hungry and waiting:
        target = min(hungry, key=lambda load: (load.running, load.worker))
        result: dict[str, int] = {}
        room = target.slots - target.running
        while room and any(waiting.values()):
            source = max(waiting, key=lambda worker: (waiting[worker], worker))
            waiting[source] -= 1
            result[source] = result.get(source, 0) + 1
            room -= 1
        return [
            Move(source=source, target=target.worker, n=n, running=False, reason="pending, another has none")
            for source, n in result.items()
        ]
    idle = [load for load in loads if not load.running and not load.pending]
    if not idle or len(loads) < 2:
        return []
    source_load = max(loads, key=lambda load: (load.running, load.worker))
    plateau = plateaus.get(source_load.kind)
    n = 0 if plateau is None else source_load.running - plateau
    if n <= 0:
        return []
    target = min(idle, key=lambda load: load.worker)
    n = min(n, target.slots)
    return [Move(source=source_load.worker, target=target.worker, n=n, running=True, reason="above the plateau")]
