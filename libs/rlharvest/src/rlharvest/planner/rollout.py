"""How many replicas of which kind generate: AReaL-Hex's integer program (its equation 2), by HiGHS.

A configuration is a kind of machine, a tensor and a pipeline degree and a batch; its rate is known from the cost model.
Since responses can be divided among replicas as one likes, the least time for B responses is B E[length] over the greatest
sum of rates, and the program is a knapsack: choose whole numbers of replicas within the GPUs of each kind, and within the
responses that the staleness bound lets run at a time. Each replica then gets responses in proportion to its rate.

Invariants (property-tested): a solution is within every limit; no combination of replicas has a greater rate (exhaustive
search on small cases); `Menu.bound` is never below it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy.optimize import Bounds, LinearConstraint, milp

from rlharvest.errors import RlharvestError
from rlharvest.planner import cost
from rlharvest.planner.training import widths
from rlharvest.planner.workload import Workload

Array = npt.NDArray[np.float64]

DEPTHS = (1, 2, 4)
"""Pipeline stages of a replica."""

PRICES = 48
"""Values that a slot is priced at for the bound."""


class SolverFailed(RlharvestError):
    """The solver did not come to an end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Machines of one kind, as the program needs them. Rates are per second, of one GPU."""

    size: int
    """GPUs of a machine."""
    gpus: int
    """Of all machines."""
    flops: float
    """Peak."""
    bandwidth: float
    """Reached in decoding, bytes."""
    hbm: float
    """Bytes."""
    link: float
    """Between two of its GPUs, bytes."""
    availability: float = 1.0
    price: float = 0.0
    """Of one GPU, dollars an hour."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """A replica."""

    kind: int
    tensor: int
    pipeline: int
    batch: int
    rate: float
    """Expected tokens a second."""

    @property
    def gpus(self) -> int:
        """GPUs of it."""
        return self.tensor * self.pipeline


Replicas = tuple[tuple[Configuration, int], ...]
"""What is to run, and how many of each."""


@dataclass(frozen=True)
class Menu:
    """What can be chosen from, and the limits that do not depend on the partition."""

    kinds: Sequence[Kind]
    configurations: Sequence[Configuration]
    inflight: int

    @cached_property
    def _columns(self) -> tuple[Array, Array, Array]:
        """Rates and batches of the configurations, and GPUs by kind (rows) and configuration."""
        usage = np.zeros((len(self.kinds), len(self.configurations)))
        for at, one in enumerate(self.configurations):
            usage[one.kind, at] = one.gpus
        rates = np.array([one.rate for one in self.configurations])
        return rates, np.array([float(one.batch) for one in self.configurations]), usage

    @cached_property
    def _priced(self) -> tuple[Array, Array]:
        """Prices of a slot, and the most that a GPU of each kind (columns) is worth at each of them (rows)."""
        rates, batches, usage = self._columns
        slot = rates / batches
        prices = np.concatenate([[0.0], np.geomspace(slot.min() / 8, slot.max(), PRICES)])
        worth = np.zeros((len(prices), len(self.kinds)))
        net = np.maximum(rates - prices[:, None] * batches, 0.0)
        for kind in range(len(self.kinds)):
            mine = usage[kind] > 0
            if mine.any():
                worth[:, kind] = (net[:, mine] / usage[kind, mine]).max(axis=1)
        return prices, worth

    def bound(self, gpus: Array) -> Array:
        """Return rates that no choice exceeds, for rows of free GPUs by kind (Lagrangian relaxation of both limits)."""
        if not self.configurations:
            return np.zeros(len(gpus))
        prices, worth = self._priced
        bound: Array = (gpus @ worth.T + prices * self.inflight).min(axis=1)
        return bound

    def best(self, gpus: Sequence[int], *, gap: float = 0.0) -> tuple[float, Replicas]:
        """Return the greatest rate with so many free GPUs of each kind, in tokens a second, and the replicas.

        Args:
            gap: relative distance from the optimum that will do.

        Raises:
            SolverFailed: HiGHS gave no solution.
        """
        rates, _, _ = self._columns
        return self._solve(-rates, gpus, gap=gap)

    def cheapest(self, gpus: Sequence[int], *, rate: float, gap: float = 0.0) -> tuple[float, Replicas]:
        """Return the replicas that reach a rate with the least money, and their rate. Raises as `best`."""
        price = [
            one.gpus * self.kinds[one.kind].price * self.kinds[one.kind].availability for one in self.configurations
        ]
        # Where GPUs are free of charge, fewer are better.
        price = [value + 1e-6 * one.gpus for value, one in zip(price, self.configurations, strict=True)]
        return self._solve(np.array(price), gpus, gap=gap, least=rate * (1 - 1e-9))

    def _solve(
        self, objective: Array, gpus: Sequence[int], *, gap: float, least: float | None = None
    ) -> tuple[float, Replicas]:
        if not self.configurations:
            return 0.0, ()
        rates, batches, usage = self._columns
        limits = [LinearConstraint(usage, ub=np.array(gpus, dtype=float)), LinearConstraint(batches, ub=self.inflight)]
        if least is not None:
            limits.append(LinearConstraint(rates / least, lb=1.0))
        scale = float(np.abs(objective).max()) or 1.0
        solution = milp(
            objective / scale,
            constraints=limits,
            bounds=Bounds(0, np.inf),
            integrality=np.ones(len(objective)),
            options={"mip_rel_gap": gap},
        )
        if solution.x is None:
            raise SolverFailed(f"HiGHS: {solution.message}")
        counts = np.rint(solution.x).astype(int)
        chosen = tuple((one, int(count)) for one, count in zip(self.configurations, counts, strict=True) if count > 0)
        return float(rates @ counts), chosen


def menu(kinds: Sequence[Kind], work: Workload) -> Menu:
    """Return every configuration that is worth choosing."""
    shape = work.shape
    found = []
    for at, kind in enumerate(kinds):
        for tensor in widths(kind.size):
            for pipeline in DEPTHS:
                gpus = tensor * pipeline
                if gpus > kind.gpus or pipeline > shape.layers:
                    continue
                room = cost.cache_sequences(
                    weight_bytes=shape.weight_bytes,
                    kv_bytes=shape.kv_bytes,
                    context=work.context_tokens,
                    gpus=gpus,
                    hbm=kind.hbm,
                )
                for batch in _batches(min(room, work.slots, work.inflight)):
                    rate = kind.availability * rate_of(kind, work, tensor=tensor, pipeline=pipeline, batch=batch)
                    found.append(Configuration(kind=at, tensor=tensor, pipeline=pipeline, batch=batch, rate=rate))
    return Menu(tuple(kinds), tuple(_undominated(found)), work.inflight)


def rate_of(kind: Kind, work: Workload, *, tensor: int, pipeline: int, batch: int) -> float:
    """Return the tokens a second of a replica whose batch is always full, prefill included."""
    shape = work.shape
    step = float(
        cost.decode_step_s(
            weight_bytes=shape.weight_bytes,
            active=shape.active,
            kv_bytes=shape.kv_bytes,
            context=work.context_tokens,
            batch=batch,
            layers=shape.layers,
            hidden=shape.hidden,
            tensor=tensor,
            pipeline=pipeline,
            tflops=kind.flops,
            bandwidth=kind.bandwidth,
            link=kind.link,
        )
    )
    prefill = cost.prefill_s(active=shape.active, prompt=work.prompt_tokens, gpus=tensor * pipeline, tflops=kind.flops)
    return batch * work.response_tokens / (work.response_tokens * step + batch * prefill)


def _batches(most: int) -> list[int]:
    """Return the batches that are considered: powers of two, and the greatest."""
    powers = [1 << bits for bits in range(max(0, most).bit_length())]
    return [*powers, most] if most and most != powers[-1] else powers


def _undominated(found: list[Configuration]) -> list[Configuration]:
    """Return those that no whole number of copies of another one replaces with no more GPUs and slots."""
    kept: list[Configuration] = []
    for one in sorted(found, key=lambda each: (each.kind, each.gpus, each.batch, -each.rate, each.pipeline)):
        if not any(
            other.kind == one.kind
            and (copies := min(one.gpus // other.gpus, one.batch // other.batch)) > 0
            and copies * other.rate >= one.rate
            for other in kept
        ):
            kept.append(one)
    return kept
