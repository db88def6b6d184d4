"""How long reserved workers seed a step, and what preemptible capacity is worth having (RLBoost, arXiv 2510.19225, alg. 1).

At the start of a step the reserved workers, which share the trainer's device, roll out beside the preemptible ones. After
T_seed seconds they sleep, what they had goes on elsewhere, and the trainer starts. T_seed grows by what the trainer waited
for responses and shrinks by what the preemptible workers stood idle at the end of the step. What balanced the two is
remembered by capacity (tokens/s of the preemptible workers together, in buckets of equal ratio), not by their count, so that
a fleet of several types has one memory. A capacity that was never seen starts from the present T_seed, moved by what the
work and the rates say (`balanced`).

Invariants (property-tested): T_seed is never negative, and infinite if and only if there is no preemptible capacity; idle
times within the deadband change nothing; a trainer that waits never shortens T_seed, idle preemptible workers never lengthen
it; a seeding that would be shorter than the switch costs is none; the same measurements give the same decision.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

NOTHING = 1e-9
"""Seconds of training, or tokens/s, up to which there are none: a quotient by less might not be finite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Constants of the controller."""

    initial_s: float = 60.0
    """T_seed of the first step."""
    gain: float = 0.5
    """Share of the imbalance that one step corrects; RLBoost's code has 1/3."""
    keep: float = 0.8
    """Weight of the newest T_seed in what is remembered."""
    deadband: float = 0.02
    """Imbalance, as a share of the step, that changes nothing."""
    bucket: float = 0.15
    """Relative width of a bucket of capacity."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What one step showed. Times in seconds, capacities in tokens/s."""

    step_s: float
    """From its first response's start until its weights were published."""
    seeded_s: float
    """How long reserved workers rolled out."""
    trainer_idle_s: float
    """How long the trainer, seeding being over, waited for less than a micro-batch (t_train^wait)."""
    remote_idle_s: float
    """From the last response of a preemptible worker to the end of the step (t_remote^wait)."""
    train_s: float
    """How long the trainer computed (t_train)."""
    remote_s: float
    """How long preemptible workers generated (t_remote)."""
    reserved_capacity: float
    """Of the reserved workers together, while they seed."""
    remote_capacity: float
    """Of the preemptible workers together, mean over the step."""
    next_capacity: float
    """The same at the end of the step: what the next one begins with."""
    tokens: float
    """Generated in the step."""
    switch_s: float = 0.0
    """What it costs that reserved workers sleep: sleeping, waking, prefilling what they had elsewhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What the next step does, and why."""

    seed_s: float
    """T_seed; infinite: until everything is done."""
    worth: float
    """Preemptible capacity, tokens/s, whose work with the seeding just fills one training; more is not used."""
    reason: str
    """For people."""


@dataclass(frozen=True, slots=True)
class State:
    """What the controller remembers. A new job starts with `State(options.initial_s)`."""

    seed_s: float
    memory: Mapping[int, float] = field(default_factory=lambda: MappingProxyType({}))
    """Bucket of capacity -> T_seed that balanced it."""


def bucket_of(capacity: float, options: Options) -> int | None:
    """Return the bucket of a capacity in tokens/s; None for no capacity."""
    return round(math.log(capacity) / math.log1p(options.bucket)) if capacity > 0 else None


def balanced(*, tokens: float, train_s: float, reserved: float, remote: float) -> float:
    """Return the T_seed at which rollout ends with the training, if work could be divided at will.

    Preemptible workers generate through seeding and training: tokens = reserved T + remote (T + train_s).

    Args:
        tokens: of the step. reserved, remote: capacities, tokens/s.
    """
    return max(0.0, tokens - remote * train_s) / (reserved + remote) if reserved + remote > NOTHING else 0.0


def worth(measured: Measured, seed_s: float) -> float:
    """Return the capacity that fills one training: N_prem, in tokens/s instead of instances; 0 before any training."""
    seeding = seed_s if math.isfinite(seed_s) else measured.seeded_s
    work = measured.remote_s * measured.remote_capacity + seeding * measured.reserved_capacity
    return work / measured.train_s if measured.train_s > NOTHING else 0.0


def decide(state: State, measured: Measured, options: Options) -> tuple[State, Decision]:
    """Return what is remembered after a step, and what the next one does."""
    now, after = bucket_of(measured.remote_capacity, options), bucket_of(measured.next_capacity, options)
    seed_s, reason = _adjust(state.seed_s, measured, options)
    memory = dict(state.memory)
    if now is not None:
        memory[now] = options.keep * seed_s + (1 - options.keep) * memory.get(now, seed_s)
    if after is None:
        # What was found stays; it is where the next capacity starts from.
        left = State(seed_s, MappingProxyType(memory))
        reason = "no preemptible worker is there: reserved workers roll out until everything is done"
        return left, Decision(seed_s=math.inf, worth=worth(measured, math.inf), reason=reason)
    if after != now:
        seed_s, reason = _recall(seed_s, memory, after, measured, options)
    told = seed_s
    if 0 < told < measured.switch_s:
        told = 0.0
        reason += f"; {seed_s:.1f} s of seeding would cost {measured.switch_s:.1f} s to switch, so there is none"
    result = State(seed_s, MappingProxyType(memory))
    return result, Decision(seed_s=told, worth=worth(measured, told), reason=reason)


def _adjust(seed_s: float, measured: Measured, options: Options) -> tuple[float, str]:
    """Return T_seed after the feedback of one step."""
    imbalance = measured.trainer_idle_s - measured.remote_idle_s
    says = f"the trainer waited {measured.trainer_idle_s:.1f} s, preemptible workers {measured.remote_idle_s:.1f} s"
    if abs(imbalance) <= options.deadband * measured.step_s:
        return seed_s, f"T_seed stays {seed_s:.1f} s: {says}"
    changed = max(0.0, seed_s + options.gain * imbalance)
    return changed, f"T_seed {seed_s:.1f} -> {changed:.1f} s: {says}"


def _recall(
    seed_s: float, memory: Mapping[int, float], after: int, measured: Measured, options: Options
) -> tuple[float, str]:
    """Return T_seed for a capacity that differs from that of the step."""
    head = f"capacity {measured.remote_capacity:.0f} -> {measured.next_capacity:.0f} tokens/s"
    known = _remembered(memory, after)
    if known is not None:
        return known, f"{head}: T_seed {known:.1f} s balanced it, or those around it, before"
    estimates = [
        balanced(tokens=measured.tokens, train_s=measured.train_s, reserved=measured.reserved_capacity, remote=remote)
        for remote in (measured.remote_capacity, measured.next_capacity)
    ]
    moved = max(0.0, seed_s + estimates[1] - estimates[0])
    return moved, f"{head}, never seen: T_seed {seed_s:.1f} -> {moved:.1f} s by work and rates"


def _remembered(memory: Mapping[int, float], bucket: int) -> float | None:
    """Return the T_seed of a bucket, or one between those of its neighbours; None if it is beyond all that are known."""
    if bucket in memory:
        return memory[bucket]
    lower = max((known for known in memory if known < bucket), default=None)
    upper = min((known for known in memory if known > bucket), default=None)
    if lower is None or upper is None:
        return None
    share = (bucket - lower) / (upper - lower)
    return (1 - share) * memory[lower] + share * memory[upper]


def reconsider(state: State, seed_s: float, capacity: float, options: Options) -> float:
    """Return T_seed of a step whose preemptible capacity has changed while reserved workers seed.

    More capacity than there was when the step began ends the seeding earlier, less prolongs it.

    Args:
        seed_s: what was decided for the step. capacity: of the preemptible workers that serve now, tokens/s.
    """
    bucket = bucket_of(capacity, options)
    if bucket is None:
        return math.inf
    known = _remembered(state.memory, bucket)
    return seed_s if known is None else known


def seeding_over(*, elapsed_s: float, seed_s: float, unfinished: int, remote_capacity: float) -> str | None:
    """Return why reserved workers sleep now, or None: they go on.

    Args:
        seed_s: T_seed for the capacity that is there now (`reconsider`).
        unfinished: groups of the step. remote_capacity: of preemptible workers that serve now, tokens/s.
    """
    if not unfinished:
        return "everything is done"
    if remote_capacity <= 0 or elapsed_s < seed_s:
        return None
    return f"T_seed of {seed_s:.1f} s is over"


def wake(
    *, remaining_tokens: float, remote_capacity: float, reserved_capacity: float, switch_s: float, trainable: bool
) -> bool:
    """Whether reserved workers that sleep should help again: the trainer has nothing to do, and it saves more than it costs.

    Args:
        remaining_tokens: about how many are to be generated. Capacities in tokens/s.
        switch_s: waking, sleeping and prefilling. trainable: a micro-batch is there for the trainer.
    """
    if trainable or remaining_tokens <= 0 or reserved_capacity <= 0:
        return False
    if remote_capacity <= 0:
        return True
    saved = remaining_tokens / remote_capacity - remaining_tokens / (remote_capacity + reserved_capacity)
    return saved > 2 * switch_s
