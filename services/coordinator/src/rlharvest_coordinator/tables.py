"""What SQL keeps: jobs, events, steps, checkpoints, groups and samples that left the ledger, workers, and who leads.

Invariants held by the database itself: one row of `leader`; one job an idempotency key; one group a place in a batch;
one event an id, so that an event that is delivered twice is kept once. Tokens of live responses are not here but in the
ledger.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, BigInteger, ForeignKey, Index, LargeBinary, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

Json = dict[str, Any]


class Base(DeclarativeBase):
    """Base of all tables."""

    type_annotation_map = {  # noqa: RUF012 - SQLAlchemy reads it as a class attribute
        Json: JSON,
        list[Any]: JSON,
        str: Text,
        bytes: LargeBinary,
    }


class Leader(Base):
    """Which coordinator leads; `beat` rises while it is alive, and who sees it stand still for a lease may take over."""

    __tablename__ = "leader"

    id: Mapped[int] = mapped_column(primary_key=True)
    epoch: Mapped[int] = mapped_column(BigInteger)
    holder: Mapped[str]
    beat: Mapped[int] = mapped_column(BigInteger)


class Job(Base):
    """One training run."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(primary_key=True)
    status: Mapped[str]
    reason: Mapped[str] = mapped_column(default="")
    """One CamelCase word for programs, e.g. WaitingForWorkers."""
    message: Mapped[str] = mapped_column(default="")
    """One sentence for people."""
    since: Mapped[float] = mapped_column(default=0.0)
    """When status or reason last changed, seconds since 1970."""
    spec: Mapped[Json]
    spec_digest: Mapped[str]
    idempotency_key: Mapped[str | None] = mapped_column(unique=True)
    error: Mapped[str | None]
    created_at: Mapped[float]
    started_at: Mapped[float | None]
    finished_at: Mapped[float | None]
    trainer: Mapped[str | None]
    """Name of the trainer that has it."""
    fence: Mapped[int] = mapped_column(BigInteger, default=0)
    """Rises with every claim."""
    step: Mapped[int] = mapped_column(default=0)
    """Optimizer steps done."""
    version: Mapped[int | None]
    """Newest published version; None before the first."""
    dataset: Mapped[Json] = mapped_column(default=dict)
    """What validation found: rows, digest, tokens; see data.report."""
    counters: Mapped[Json] = mapped_column(default=dict)
    """Totals that outlive the ledger."""
    deleted: Mapped[bool] = mapped_column(default=False)
    resource_version: Mapped[int] = mapped_column(default=1)

    __mapper_args__ = {"version_id_col": resource_version}  # noqa: RUF012
    __table_args__ = (Index("jobs_by_status", "status"),)


class Event(Base):
    """What happened to a job."""

    __tablename__ = "events"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    id: Mapped[str] = mapped_column(unique=True)
    job: Mapped[str]
    level: Mapped[str]
    type: Mapped[str]
    message: Mapped[str]
    data: Mapped[Json] = mapped_column(default=dict)
    at: Mapped[float]
    source: Mapped[str]

    __table_args__ = (Index("events_by_job", "job", "number"),)


class AuditRow(Base):
    """A call that changed something through the API, or was to; see store.audit."""

    __tablename__ = "audit"

    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=True)
    at: Mapped[float]
    who: Mapped[str]
    address: Mapped[str]
    protocol: Mapped[str]
    action: Mapped[str]
    subject: Mapped[str | None]
    result: Mapped[str]
    done: Mapped[bool]

    __table_args__ = (Index("audit_by_subject", "subject", "number"),)


class Step(Base):
    """An optimizer step and its metrics. Step 0 is the publication of the initial weights."""

    __tablename__ = "steps"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    step: Mapped[int] = mapped_column(primary_key=True)
    version: Mapped[int]
    digest: Mapped[str]
    fence: Mapped[int] = mapped_column(BigInteger)
    metrics: Mapped[Json]
    at: Mapped[float]


class Version(Base):
    """A publication of weights: the optimizer step that each version number stands for."""

    __tablename__ = "versions"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    version: Mapped[int] = mapped_column(primary_key=True)
    step: Mapped[int]
    digest: Mapped[str]
    at: Mapped[float]


class CheckpointRow(Base):
    """A durable state of the trainer."""

    __tablename__ = "checkpoints"

    id: Mapped[str] = mapped_column(primary_key=True)
    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    step: Mapped[int]
    version: Mapped[int]
    path: Mapped[str]
    digest: Mapped[str]
    metrics: Mapped[Json]
    at: Mapped[float]

    __table_args__ = (UniqueConstraint("job", "step"),)


class Group(Base):
    """A group that left the ledger: accepted, then committed to a batch, then trained; or dropped."""

    __tablename__ = "groups"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    ordinal: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    state: Mapped[str]
    """accepted | committed | trained | dropped"""
    step: Mapped[int | None]
    """Batch it is committed to."""
    position: Mapped[int | None]
    reason: Mapped[str | None]
    """Why it was dropped."""
    prompt: Mapped[int]
    data_epoch: Mapped[int]
    tokens: Mapped[int]
    reward_mean: Mapped[float | None]
    reward_std: Mapped[float | None]
    oldest_version: Mapped[int | None]
    newest_version: Mapped[int | None]
    staleness: Mapped[int | None]
    """Optimizer steps between the oldest token's version and the batch, at commit."""
    masked: Mapped[bool] = mapped_column(default=False)
    at: Mapped[float]

    __table_args__ = (
        UniqueConstraint("job", "step", "position"),
        Index("groups_by_state", "job", "state", "ordinal"),
        Index("groups_by_prompt", "job", "prompt", "data_epoch"),
    )


class Sample(Base):
    """A finished and scored response."""

    __tablename__ = "samples"

    job: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    handle: Mapped[int] = mapped_column(BigInteger, primary_key=True)
    response_id: Mapped[str] = mapped_column(unique=True)
    group: Mapped[int] = mapped_column("group_ordinal", BigInteger)
    finish: Mapped[str]
    """eos | stop | length"""
    ids: Mapped[bytes]
    """Little-endian u32."""
    logprobs: Mapped[bytes]
    """Little-endian f32."""
    runs: Mapped[list[Any]]
    """[[n, version], …]"""
    pieces: Mapped[list[Any]]
    """[[offset, n, attempt as a string, worker], …]: who generated what."""
    prompt_text: Mapped[str]
    text: Mapped[str]
    reward: Mapped[float]
    components: Mapped[list[Any]]
    """[[name, value or null, weight], …]"""
    at: Mapped[float]

    __table_args__ = (Index("samples_by_group", "job", "group_ordinal"),)


class Worker(Base):
    """A worker that joined; the newest incarnation of each."""

    __tablename__ = "workers"

    id: Mapped[str] = mapped_column(primary_key=True)
    incarnation: Mapped[int] = mapped_column(BigInteger)
    state: Mapped[str]
    worker_class: Mapped[str]
    worker_type: Mapped[str] = mapped_column(default="")
    hostname: Mapped[str]
    pid: Mapped[int]
    engines: Mapped[list[Any]]
    slots: Mapped[int]
    numerics_key: Mapped[str] = mapped_column(default="")
    batch_invariant: Mapped[bool] = mapped_column(default=False)
    build: Mapped[str] = mapped_column(default="")
    joined_at: Mapped[float]
    left_at: Mapped[float | None]
    reason: Mapped[str] = mapped_column(default="")
