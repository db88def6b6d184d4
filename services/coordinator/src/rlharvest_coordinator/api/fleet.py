"""The objects of REST that are not of one job: workers, and versions of weights."""

from __future__ import annotations

from typing import Literal

from rlharvest_coordinator.api.resources import Resource, Seconds
from rlharvest_coordinator.live import LiveWorker
from rlharvest_coordinator.tables import Worker


class WorkerResource(Resource):
    """A worker, as its last heartbeat has it, or as it was when it left."""

    id: str
    object: Literal["rl.worker"] = "rl.worker"
    state: str
    """joining, warming, ready, draining, suspect, dead or gone."""
    incarnation: str
    """Decimal; rises each time it joins."""
    job: str | None
    version: int | None
    slots: int
    held: int
    tokens_per_s: float | None
    generated_tokens: int | None
    heartbeat_age_s: float | None
    note: str
    """What it does, or why it left."""
    hostname: str
    pid: int
    worker_class: str
    """reserved or preemptible."""
    worker_type: str
    engines: list[str]
    numerics_key: str
    batch_invariant: bool
    joined_at: Seconds
    left_at: Seconds | None


class VersionResource(Resource):
    """A published version of a job's weights."""

    version: int
    step: int
    """Optimizer steps done."""
    parent: int | None
    """Version it was trained from."""
    digest: str
    bytes: int
    created_at: Seconds


def live_worker(worker: LiveWorker) -> WorkerResource:
    """Return a worker that is here."""
    return WorkerResource(
        id=worker.id,
        state=worker.state,
        incarnation=str(worker.incarnation),
        job=worker.job,
        version=worker.version,
        slots=worker.slots,
        held=worker.held,
        tokens_per_s=worker.tokens_per_s,
        generated_tokens=worker.generated_tokens,
        heartbeat_age_s=worker.heartbeat_age_s,
        note=worker.note,
        hostname=worker.hostname,
        pid=worker.pid,
        worker_class=worker.worker_class,
        worker_type=worker.worker_type,
        engines=list(worker.engines),
        numerics_key=worker.numerics_key,
        batch_invariant=worker.batch_invariant,
        joined_at=worker.joined_at,
        left_at=None,
    )


def past_worker(row: Worker) -> WorkerResource:
    """Return a worker that is in SQL only."""
    return WorkerResource(
        id=row.id,
        state=row.state,
        incarnation=str(row.incarnation),
        job=None,
        version=None,
        slots=row.slots,
        held=0,
        tokens_per_s=None,
        generated_tokens=None,
        heartbeat_age_s=None,
        note=row.reason,
        hostname=row.hostname,
        pid=row.pid,
        worker_class=row.worker_class,
        worker_type=row.worker_type,
        engines=row.engines,
        numerics_key=row.numerics_key,
        batch_invariant=row.batch_invariant,
        joined_at=row.joined_at,
        left_at=row.left_at,
    )
