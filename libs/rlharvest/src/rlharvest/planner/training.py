"""The fastest way to train on every set of machines: the constrained search of AReaL-Hex, section 4.1.

Ranks of a tensor- or data-parallel group are GPUs of one kind of machine; only pipeline stages may be of different kinds (at
most two), because links between kinds are slow. Layers are divided among stages in proportion to their compute. Usage is
counted in units: whole machines, or single GPUs where the inventory has a single machine.

Invariants (property-tested): a plan fits into memory on every GPU; none uses more than there is; no plan of the space that
uses the same units is faster.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rlharvest.planner import cost
from rlharvest.planner.workload import Workload

Array = npt.NDArray[np.float64]

DEPTHS = (1, 2, 4, 8)
"""Pipeline stages of one kind of machine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Machines of one kind, as the search needs them. Rates are per second, of one GPU."""

    size: int
    """GPUs of a machine."""
    unit: int
    """GPUs of a unit: `size`, or 1."""
    units: int
    """How many units may train."""
    flops: float
    """Reached in training."""
    hbm: float
    """Bytes."""
    link: float
    """Between two of its GPUs, bytes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stages:
    """Pipeline stages on one kind of machine, all alike."""

    kind: int
    tensor: int
    pipeline: int
    layers: int
    """Of all these stages together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A way to train."""

    seconds: float
    data: int
    stages: tuple[Stages, ...]
    units: tuple[int, ...]
    """Used of each kind."""

    @property
    def gpus(self) -> int:
        """GPUs that compute."""
        return self.data * sum(part.tensor * part.pipeline for part in self.stages)


def widths(size: int) -> list[int]:
    """Return the tensor-parallel degrees inside a machine of so many GPUs."""
    return [1 << bits for bits in range(size.bit_length()) if 1 << bits <= size]


def search(kinds: list[Kind], work: Workload, *, same_link: float, cross_link: float) -> list[Training]:
    """Return the fastest plan of every usage, in the order of their time.

    Args:
        same_link, cross_link: bytes per second of a machine to others of its kind, and of others.
    """
    found: dict[tuple[int, ...], Training] = {}
    able = [at for at, kind in enumerate(kinds) if kind.units]
    for first in able:
        for plan in _grid(kinds, (first,), work, same_link, cross_link):
            found[plan.units] = plan
    for first in able:
        for second in able:
            if first < second:
                for plan in _grid(kinds, (first, second), work, same_link, cross_link):
                    if plan.units not in found or plan.seconds < found[plan.units].seconds:
                        found[plan.units] = plan
    return sorted(found.values(), key=lambda plan: (plan.seconds, plan.units))


def _grid(
    kinds: list[Kind], used: tuple[int, ...], work: Workload, same_link: float, cross_link: float
) -> Iterator[Training]:
    """Yield, for each usage of exactly these kinds, the fastest plan."""
    best: dict[tuple[int, ...], tuple[float, int, tuple[Stages, ...]]] = {}
    for parts in _shapes(kinds, used, work.shape.layers):
        per_rank = [part.tensor * part.pipeline for part in parts]
        most = min(kinds[part.kind].units * kinds[part.kind].unit // n for part, n in zip(parts, per_rank, strict=True))
        most = min(most, work.responses)
        if most < 1:
            continue
        data = np.arange(1, most + 1, dtype=np.float64)
        seconds = step_s(kinds, parts, data, work, same_link=same_link, cross_link=cross_link)
        usage = [np.ceil(data * n / kinds[part.kind].unit).astype(int) for part, n in zip(parts, per_rank, strict=True)]
        for at in np.flatnonzero(np.isfinite(seconds)):
            key = tuple(int(column[at]) for column in usage)
            if key not in best or seconds[at] < best[key][0]:
                best[key] = (float(seconds[at]), int(at) + 1, parts)
    for key, (time, ranks, parts) in best.items():
        units = [0] * len(kinds)
        for kind, n in zip(used, key, strict=True):
            units[kind] = n
        yield Training(seconds=time, data=ranks, stages=parts, units=tuple(units))


def _shapes(kinds: list[Kind], used: tuple[int, ...], layers: int) -> Iterator[tuple[Stages, ...]]:
    """Yield the stages of one data-parallel rank: tensor and pipeline degrees, layers divided by compute."""
    first = kinds[used[0]]
    for tensor in widths(first.size):
        for pipeline in DEPTHS:
            if pipeline > layers:
                continue
            if len(used) == 1:
                yield (Stages(kind=used[0], tensor=tensor, pipeline=pipeline, layers=layers),)
                continue
            second = kinds[used[1]]
            for other_tensor in widths(second.size):
                for other_pipeline in DEPTHS:
                    if pipeline + other_pipeline > layers:
                        continue
                    one = tensor * pipeline * first.flops
                    both = one + other_tensor * other_pipeline * second.flops
                    share = min(max(round(layers * one / both), pipeline), layers - other_pipeline)
                    yield (
                        Stages(kind=used[0], tensor=tensor, pipeline=pipeline, layers=share),
                        Stages(kind=used[1], tensor=other_tensor, pipeline=other_pipeline, layers=layers - share),
                    )


def step_s(
    kinds: list[Kind], parts: tuple[Stages, ...], data: Array, work: Workload, *, same_link: float, cross_link: float
) -> Array:
    """Return the seconds of an optimizer step for each number of data-parallel ranks; infinite where memory is short."""
    shape = work.shape
    # A rank has whole sequences: it cannot have less than the longest.
    tokens = np.maximum(work.trained / data, work.longest)
    most = max(float(work.micro_batch_tokens), work.longest)
    micro = np.minimum(tokens, most)
    batches = np.ceil(tokens / micro)
    depth = sum(part.pipeline for part in parts)
    flops = cost.training_flops(active=shape.active, forwards=work.forwards)
    slowest, reduce, fits = np.zeros_like(data), np.zeros_like(data), np.ones_like(data, dtype=bool)
    for part in parts:
        kind = kinds[part.kind]
        layers = -(-part.layers // part.pipeline)
        share = layers / shape.layers
        volume = 4 * layers * shape.hidden * 2 * 2 * (part.tensor - 1) / part.tensor
        slowest = np.maximum(slowest, flops * share / (part.tensor * kind.flops) + volume / kind.link)
        ranks_here = np.minimum(data, max(1, kind.size // part.tensor))
        machines = np.ceil(data * part.tensor / kind.size)
        gradient = 2 * shape.parameters * share
        inside = 2 * (ranks_here - 1) / ranks_here * gradient / part.tensor / kind.link
        reduce = np.maximum(reduce, inside + 2 * (machines - 1) / machines * gradient / same_link)
        need = cost.training_bytes(
            parameters=shape.parameters * share,
            data=data,
            tensor=part.tensor,
            tokens=most,
            layers=float(layers),
            hidden=shape.hidden,
            logits=float(shape.vocabulary if part is parts[-1] else 0),
        )
        fits &= need <= kind.hbm * cost.MEMORY_SHARE
    compute = tokens * slowest * (batches + depth - 1) / batches
    talk = np.zeros_like(data)
    if depth > 1:
        link = cross_link if len(parts) > 1 else same_link
        part = parts[0]
        inside = len(parts) == 1 and part.tensor * part.pipeline <= kinds[part.kind].size
        senders = np.ceil(data * part.tensor / kinds[part.kind].size)
        volume = work.trained * shape.hidden * 2 * 2
        talk = volume / (data * kinds[part.kind].link if inside else senders * link)
    return np.where(fits, np.maximum(compute, talk) + reduce, np.inf)
