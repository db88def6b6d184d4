"""What the API may ask of the part that runs jobs, and what it tells it. `LiveView` is all that joins the two."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveJob:
    """A running job as the ledger has it now."""

    reason: str
    """WaitingForWorkers | WaitingForTrainer | Generating | Training | Starved | ..."""
    message: str
    pending: int
    """Responses without an owner."""
    running: int
    finished: int
    """Finished, not yet in SQL."""
    admitted_groups: int
    workers_ready: int
    counters: dict[str, int] = field(default_factory=dict)
    """submitted, trained, dropped, outstanding (responses); generated_tokens, salvaged_tokens, regenerated_tokens,
    reassigned, preemptions, fenced_tokens, duplicate_tokens."""
    waiting_for: list[str] = field(default_factory=list)
    """Response ids that hold the job up, oldest first, at most 20."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveWorker:
    """A worker as its last heartbeat has it."""

    id: str
    incarnation: int
    state: str
    job: str | None
    version: int | None
    slots: int
    held: int
    tokens_per_s: float
    generated_tokens: int
    heartbeat_age_s: float
    note: str
    hostname: str
    pid: int
    worker_class: str
    worker_type: str
    engines: tuple[str, ...]
    numerics_key: str
    batch_invariant: bool
    joined_at: float


class LiveView(Protocol):
    """The running part of the coordinator."""

    @property
    def leading(self) -> bool:
        """Whether this coordinator leads; if not, calls that change something are refused."""
        ...

    @property
    def epoch(self) -> int: ...

    def job(self, job: str) -> LiveJob | None:
        """A job that runs here, or None."""
        ...

    def workers(self) -> list[LiveWorker]: ...

    async def drain(self, worker: str, reason: str) -> None:
        """Tell a worker to stop, hand back and leave. Raises NotFound."""
        ...

    async def live_sample(self, job: str, handle: int) -> dict[str, Any] | None:
        """A response that is still in the ledger, in the shape of the samples API, or None."""
        ...

    async def live_samples(self, job: str, limit: int) -> list[dict[str, Any]]:
        """Responses that are still in the ledger."""
        ...

    def wake(self, job: str) -> None:
        """A job's row changed: look at it now."""
        ...
