"""The protocol between a rollout worker and an engine.

An engine turns requests into spans. It knows nothing of buses, leases or acknowledgements. Invariants:

- Generation runs off the event loop: every method returns at once or awaits; heartbeats go on while it computes.
- Tokens of a response come out in order, without gap or repetition; the finish comes with the last of them, once.
- Each token carries the version whose weights sampled it. A version switch is atomic between two tokens: pause, load, go on.
  If a load fails the engine serves the old version as before, or raises EngineBroken and serves nothing: never half of each.
- Token i of a response uses uniform i of its seed (rlharvest.noise), counted from the start of the response, not of the
  request, and inverse-CDF sampling in vocabulary order. So a request with a prefix continues as if never interrupted.
- A request whose prefix already ends the response (rlharvest.terminal) yields its finish and no token.
- `submit` of a (handle, attempt) that it has is ignored; of a newer attempt replaces the older one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from rlharvest.errors import InfrastructureError
from rlharvest.spans import Ids, Span
from rlharvest.speculation.history import DraftSource
from rlharvest.speculation.options import Speculation

Kv = Literal["recompute", "keep"]


class EngineBroken(InfrastructureError):
    """The engine can serve no more; its worker must leave the pool."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How to sample; equal for all responses of a job."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    eos_ids: frozenset[int] = frozenset()
    stop: tuple[str, ...] = ()
    vocab: int = 0
    """Ids at or above are never sampled (padded heads); 0: no mask."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One response to start or to continue."""

    handle: int
    attempt: int
    group: int
    """Requests of one group share their prompt: prefill it once."""
    seed: int
    """64 bits, of the position-indexed noise."""
    prompt: Ids
    prefix: Ids
    """Tokens of the response generated before, maybe elsewhere."""
    budget: int
    """Most tokens of the response, prefix included."""
    sampling: Sampling
    drafts: DraftSource | None = None
    """Earlier responses to the prompt. They may make it faster and change nothing; siblings share one object."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """What an engine is told when it starts to serve a job."""

    slots: int
    """Most requests at a time."""
    context: int
    """Most tokens of a prompt and its response together."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    batch_invariant: bool = False
    kv: Kv = "recompute"
    speculation: Speculation = field(default_factory=Speculation)
    options: dict[str, Any]
    """Settings of the engine's own (rollout.stub of the job, for the stub engine)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """Counters since the start, and what runs now."""

    running: int = 0
    waiting: int = 0
    generated_tokens: int = 0
    prefill_tokens: int = 0
    prefill_saved_tokens: int = 0
    """Prompt tokens that prefix sharing did not compute again."""
    drafts: int = 0
    """Drafts verified."""
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """Of the drafted ones."""


class Engine(Protocol):
    """An engine of one worker, for one job at a time."""

    @property
    def version(self) -> int | None:
        """Version that samples now; None before the first load."""
        ...

    @property
    def numerics_key(self) -> str:
        """Engine, build, instruction set, dtype, block, parallelism: equal keys promise equal bits."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """Whether a continuation is bit-exact within one numerics key."""
        ...

    async def start(self, config: EngineConfig) -> None:
        """Get ready for a job; forgets every request of the one before."""
        ...

    async def load(self, directory: Path, version: int) -> None:
        """Switch to the weights in a Hugging Face directory, in flight. Idempotent by version.

        Raises:
            DataError: the directory does not hold a model this engine can run; the old version goes on.
            EngineBroken: neither the old nor the new version can be served.
        """
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Take requests; more than `slots` wait in the engine."""
        ...

    def abort(self, handles: Sequence[tuple[int, int]]) -> None:
        """Forget these (handle, attempt) pairs; no span of them comes after this returns."""
        ...

    async def spans(self) -> list[Span]:
        """Wait for new tokens; return all there are, one span a response (more where the version changed is allowed).

        Raises:
            EngineBroken: it died.
        """
        ...

    def pause(self) -> None:
        """Generate nothing until `resume`: the worker's buffer is full. Idempotent."""
        ...

    def resume(self) -> None:
        """Go on. Idempotent."""
        ...

    def stats(self) -> EngineStats: ...

    async def close(self) -> None:
        """Stop, free the device, leave no process behind. Idempotent."""
        ...
