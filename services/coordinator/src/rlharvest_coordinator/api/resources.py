"""The objects of REST: jobs, events, samples, checkpoints (workers and versions: fleet.py). Pure: rows in, JSON out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Generic, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field
from rlharvest.ids import response_id
from rlharvest.jobs.model import JobSpec
from rlharvest.spans import as_ids, as_logprobs

from rlharvest_coordinator.live import LiveJob
from rlharvest_coordinator.tables import CheckpointRow, Event, Group, Job, Sample

Item = TypeVar("Item")

Seconds = Annotated[float, Field(description="Seconds since 1970.")]


class Resource(BaseModel):
    """An answer of REST. Docstrings of fields are their descriptions."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")


class ListOf(Resource, Generic[Item]):
    """A part of a list."""

    object: Literal["list"] = "list"
    data: list[Item]
    first_id: str | None = None
    last_id: str | None = None
    has_more: bool = False
    """Whether more follow: ask again with `after` = the last one."""


class StatusDetail(Resource):
    """Why a job is where it is."""

    reason: str
    """One word for programs, e.g. WaitingForWorkers."""
    message: str
    """One sentence for people."""
    since: Seconds


class Progress(Resource):
    """How far a job is."""

    step: int
    """Optimizer steps done."""
    max_steps: int
    weight_version: int | None
    """Newest published version."""
    trained_tokens: int
    generated_tokens: int
    salvaged_tokens: int
    """Tokens that a response kept when it lost its worker."""
    regenerated_tokens: int
    """Tokens that had to be sampled again."""


class JobWorkers(Resource):
    """The workers of a job."""

    ready: int
    lost_total: int
    """Preemptions so far."""


class Responses(Resource):
    """Live responses of a running job."""

    pending: int
    """Without a worker."""
    running: int
    finished: int
    """Finished, not yet in a batch."""
    admitted_groups: int
    waiting_for: list[str]
    """Responses that hold the job up, oldest first."""


class JobResource(Resource):
    """A job."""

    id: str
    object: Literal["rl.job"] = "rl.job"
    name: str
    model: str
    status: str
    """validating, queued, running, pausing, paused, cancelling, succeeded, failed or cancelled."""
    status_detail: StatusDetail
    queue_position: int | None = None
    """Jobs before it in the queue; null unless queued."""
    created_at: Seconds
    started_at: Seconds | None
    finished_at: Seconds | None
    trainer: str | None
    progress: Progress
    workers: JobWorkers
    counters: dict[str, int]
    """Responses: submitted = trained + dropped + outstanding; and tokens."""
    responses: Responses | None
    """Null unless running."""
    dataset: dict[str, Any]
    """What validation found."""
    error: str | None
    latest_checkpoint: str | None
    """Directory of the newest checkpoint."""
    metadata: dict[str, str]
    resource_version: int
    """Rises with every change."""
    spec: dict[str, Any]
    """The whole job, with every default filled in."""


class DeletedJob(Resource):
    """A job that is gone."""

    id: str
    object: Literal["rl.job.deleted"] = "rl.job.deleted"
    deleted: Literal[True] = True
    checkpoints: str | None
    """Directory of its checkpoints, which are still there: delete it when you need them no more. Null: there is none."""


class EventResource(Resource):
    """Something that happened to a job."""

    id: str
    object: Literal["rl.job.event"] = "rl.job.event"
    number: int
    """Place in the order; the cursor of events."""
    job: str
    level: str
    """info, warn or error."""
    type: str
    message: str
    data: dict[str, Any]
    source: str
    """The service or worker that says it."""
    created_at: Seconds


class MetricsResource(Resource):
    """Curves of a job; every series is as long as `steps`."""

    object: Literal["rl.job.metrics"] = "rl.job.metrics"
    job: str
    steps: list[int]
    series: dict[str, list[float | None]]


class CheckpointResource(Resource):
    """A durable state of the trainer."""

    id: str
    object: Literal["rl.job.checkpoint"] = "rl.job.checkpoint"
    job: str
    step: int
    version: int
    path: str
    """A Hugging Face directory."""
    digest: str
    metrics: dict[str, Any]
    created_at: Seconds


class Component(Resource):
    """What one reward function gave."""

    name: str
    value: float | None
    weight: float


class SampleSummary(Resource):
    """A response without its tokens."""

    id: str
    object: Literal["rl.sample"] = "rl.sample"
    job: str
    handle: int
    group: int
    state: str
    """pending, assigned, streaming, finished or scored while live; then accepted, committed, trained or dropped."""
    step: int | None
    """Batch its group is in."""
    staleness: int | None
    """Optimizer steps between its group's oldest token and the batch."""
    finish: str | None
    """eos, stop or length; null while it goes on."""
    length: int
    """Tokens."""
    oldest_version: int | None
    newest_version: int | None
    prompt: str
    text: str
    reward: float | None
    components: list[Component]
    created_at: Seconds


class VersionRun(Resource):
    """Tokens in a row that one version sampled."""

    n: int
    version: int


class Piece(Resource):
    """Tokens in a row that one worker generated under one attempt."""

    offset: int
    n: int
    attempt: str
    """Fencing number, decimal: epoch times 2**32 plus a counter."""
    worker: str


class SampleResource(SampleSummary):
    """A response with its tokens."""

    token_ids: list[int]
    logprobs: list[float | None]
    """Natural logarithm, of the distribution that was sampled from."""
    version_runs: list[VersionRun]
    pieces: list[Piece]


def listed(data: Sequence[Item], has_more: bool) -> ListOf[Item]:
    """Return a part of a list; each item has an `id`."""
    first, last = (str(getattr(data[end], "id")) if data else None for end in (0, -1))  # noqa: B009 - Item has no bound
    return ListOf[Item](data=list(data), first_id=first, last_id=last, has_more=has_more)


def job_resource(
    row: Job, live: LiveJob | None, *, checkpoint: CheckpointRow | None, position: int | None = None
) -> JobResource:
    """Return a job as REST shows it.

    Args:
        live: the ledger's view, if the job runs here; its words and numbers are newer than the row's.
        checkpoint: the newest one.
        position: place in the queue.
    """
    running = live if row.status == "running" else None
    counters = {**row.counters, **(live.counters if live is not None else {})}
    spec = JobSpec.model_validate(row.spec)
    reason, message = (running.reason, running.message) if running is not None else (row.reason, row.message)
    return JobResource(
        id=row.id,
        name=spec.name,
        model=spec.model,
        status=row.status,
        status_detail=StatusDetail(reason=reason, message=message, since=row.since),
        queue_position=position,
        created_at=row.created_at,
        started_at=row.started_at,
        finished_at=row.finished_at,
        trainer=row.trainer,
        progress=Progress(
            step=row.step,
            max_steps=spec.limits.max_steps,
            weight_version=row.version,
            trained_tokens=counters.get("trained_tokens", 0),
            generated_tokens=counters.get("generated_tokens", 0),
            salvaged_tokens=counters.get("salvaged_tokens", 0),
            regenerated_tokens=counters.get("regenerated_tokens", 0),
        ),
        workers=JobWorkers(
            ready=live.workers_ready if live is not None else 0, lost_total=counters.get("preemptions", 0)
        ),
        counters=counters,
        responses=None
        if live is None
        else Responses(
            pending=live.pending,
            running=live.running,
            finished=live.finished,
            admitted_groups=live.admitted_groups,
            waiting_for=live.waiting_for,
        ),
        dataset=row.dataset,
        error=row.error,
        latest_checkpoint=checkpoint.path if checkpoint is not None else None,
        metadata=spec.metadata,
        resource_version=row.resource_version,
        spec=row.spec,
    )


def event_resource(row: Event) -> EventResource:
    """Return an event as REST shows it."""
    return EventResource(
        id=row.id,
        number=row.number,
        job=row.job,
        level=row.level,
        type=row.type,
        message=row.message,
        data=row.data,
        source=row.source,
        created_at=row.at,
    )


def checkpoint_resource(row: CheckpointRow) -> CheckpointResource:
    """Return a checkpoint as REST shows it."""
    return CheckpointResource(
        id=row.id,
        job=row.job,
        step=row.step,
        version=row.version,
        path=row.path,
        digest=row.digest,
        metrics=row.metrics,
        created_at=row.at,
    )


def sample_summary(row: Sample, group: Group | None) -> SampleSummary:
    """Return a response without its tokens."""
    return SampleSummary(**_summary(row, group))


def sample_resource(row: Sample, group: Group | None) -> SampleResource:
    """Return a response with its tokens."""
    return SampleResource(
        **_summary(row, group),
        token_ids=as_ids(row.ids).tolist(),
        logprobs=as_logprobs(row.logprobs).tolist(),
        version_runs=[VersionRun(n=n, version=version) for n, version in row.runs],
        pieces=[
            Piece(offset=offset, n=n, attempt=str(attempt), worker=worker) for offset, n, attempt, worker in row.pieces
        ],
    )


def _summary(row: Sample, group: Group | None) -> dict[str, Any]:
    versions = [version for _, version in row.runs]
    return {
        "id": response_id(row.job, row.handle),
        "job": row.job,
        "handle": row.handle,
        "group": row.group,
        "state": group.state if group is not None else "scored",
        "step": group.step if group is not None else None,
        "staleness": group.staleness if group is not None else None,
        "finish": row.finish,
        "length": sum(n for n, _ in row.runs),
        "oldest_version": min(versions, default=None),
        "newest_version": max(versions, default=None),
        "prompt": row.prompt_text,
        "text": row.text,
        "reward": row.reward,
        "components": [Component(name=name, value=value, weight=weight) for name, value, weight in row.components],
        "created_at": row.at,
    }
