"""What a worker obeys and what it pulls next: pure decisions about epochs, leases and versions.

Invariants: a message of a lower epoch than one seen before, or for another incarnation, is refused; the version that
is served only rises within a job; a version is never reported before it is loaded; a stream of ever newer targets
cannot keep a worker from ever loading one: a pull that replaced another is run to its end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from pydantic import ValidationError
from rlharvest.engine import EngineConfig, Kv
from rlharvest.jobs.model import Rollout
from rlharvest.ledger.response import MAX_EPOCH
from rlharvest.speculation.options import Speculation
from rlharvest.v1 import fleet_pb2

RETRY_FIRST_S = 0.5
RETRY_MOST_S = 15.0


@dataclass(slots=True)
class Fence:
    """Who may give orders: the newest coordinator, to the present incarnation."""

    epoch: int = 0
    incarnation: int = 0

    def refusal(self, epoch: int, incarnation: int) -> str | None:
        """Return why a message is refused, or None; a higher epoch is remembered."""
        if incarnation != self.incarnation:
            return f"incarnation {incarnation} is not mine, which is {self.incarnation}"
        if epoch > MAX_EPOCH:
            return f"{epoch} is not an epoch"  # obeyed once, it would make every real one too old for ever
        if epoch < self.epoch:
            return f"epoch {epoch} is over; {self.epoch} was seen"
        self.epoch = epoch
        return None

    def joined(self, epoch: int, incarnation: int) -> None:
        """A coordinator registered this worker."""
        self.epoch = max(self.epoch, epoch)
        self.incarnation = incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What the worker shall serve."""

    job: str
    engine: str
    weights_url: str
    version: int
    tokenizer_digest: str
    config: EngineConfig

    def same_service(self, other: Target | None) -> bool:
        """Whether the two differ in nothing that needs another start of the engine."""
        return other is not None and (self.job, self.engine, self.config) == (other.job, other.engine, other.config)


def engine_for(wanted: str, offered: Sequence[str], *, batch_invariant: bool) -> str | None:
    """Return the engine that serves a job, of those offered, best first; None: none does.

    `auto` is the best one that computes a model and can do what is asked: vLLM cannot be batch-invariant.
    """
    if wanted != "auto":
        return wanted if wanted in offered else None
    real = [name for name in offered if name != "stub"]
    if batch_invariant and "torch" in real:
        return "torch"
    return real[0] if real else None


def target_of(lease: fleet_pb2.Lease, *, offered: Sequence[str], slots: int) -> Target | str:
    """Return the target that a lease sets, or why it cannot be served."""
    try:
        rollout = Rollout.model_validate_json(lease.rollout_json or "{}")
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        return f"rollout_json: {'.'.join(str(part) for part in first['loc'])}: {first['msg']}"
    engine = engine_for(lease.engine, offered, batch_invariant=bool(rollout.batch_invariant))
    if engine is None:
        return f"engine {lease.engine!r} is not offered here; offered: {', '.join(offered)}"
    kv: Kv = "keep" if (lease.kv or rollout.kv) == "keep" else "recompute"
    drafts = rollout.speculation
    config = EngineConfig(
        slots=min(slots, rollout.max_inflight_per_worker),
        context=lease.context,
        dtype=rollout.dtype,
        batch_invariant=bool(rollout.batch_invariant),
        kv=kv,
        speculation=Speculation(
            enabled=drafts.enabled,
            window_max=drafts.window_max,
            match_max=drafts.match_max,
            match_min=drafts.match_min,
        ),
        options=rollout.stub if engine == "stub" else rollout.torch.model_dump() if engine == "torch" else {},
    )
    return Target(
        job=lease.job,
        engine=engine,
        weights_url=lease.weights_url,
        version=lease.target_version,
        tokenizer_digest=lease.tokenizer_digest,
        config=config,
    )


class Pull(Enum):
    """What to do about the version."""

    WAIT = "wait"
    START = "start"
    """Pull the target."""
    REPLACE = "replace"
    """Give the running pull up and pull the target."""


@dataclass(slots=True)
class Pulls:
    """Which version is pulled when; one instance for each job that is served."""

    target: int
    loaded: int | None = None
    pulling: int | None = None
    replaced: bool = False
    """The running pull replaced another one, so it is not replaced itself."""
    loading: bool = False
    """The pulled version goes into the engine: too late to replace it."""
    failures: int = 0
    """In a row."""

    def want(self, version: int) -> None:
        """The coordinator names a target; a lower one than before is an old message."""
        if version > self.target:
            self.target = version
            self.failures = 0

    def decide(self) -> Pull:
        """Return what to do now."""
        if self.pulling is not None:
            newer = self.target > self.pulling
            return Pull.REPLACE if newer and not self.replaced and not self.loading else Pull.WAIT
        return Pull.START if self.loaded is None or self.target > self.loaded else Pull.WAIT

    def start(self) -> int:
        """A pull of the target starts; return its version."""
        self.replaced = self.pulling is not None
        self.pulling = self.target
        return self.target

    def succeeded(self) -> None:
        """The pulled version is loaded."""
        self.loaded, self.pulling, self.loading, self.failures = self.pulling, None, False, 0

    def failed(self) -> float:
        """The pull or the load failed; return the seconds to wait before the next try."""
        self.pulling, self.loading = None, False
        self.failures += 1
        return float(min(RETRY_FIRST_S * 2 ** min(self.failures - 1, 10), RETRY_MOST_S))
