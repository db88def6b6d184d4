"""/v1/fine_tuning/jobs: our jobs in the words of OpenAI's API, so that its unmodified client drives them.

    client.fine_tuning.jobs.create(
        model="model", training_file="data/train.jsonl", method={"type": "reinforcement", "reinforcement": {...}},
        extra_body={"rlharvest": {"rewards": [{"builtin": "numeric"}], "limits": {"max_steps": 100}}},
    )

Pure: what cannot be mapped is refused by name, never ignored. Docs of the words: platform.openai.com, fine-tuning.
"""

from __future__ import annotations

from typing import Any, Literal

from rlharvest.errors import InvalidField

from rlharvest_coordinator.api.resources import JobResource, Resource
from rlharvest_coordinator.tables import CheckpointRow, Event

Json = dict[str, Any]

STATUSES = {"validating": "validating_files", "pausing": "running", "cancelling": "running"}
"""Our statuses that OpenAI calls otherwise; the rest are the same."""

_KNOWN = ("model", "training_file", "method", "seed", "suffix", "metadata", "rlharvest")
_AUTOMATIC = (None, "auto", "default")


class OpenAIError(Resource):
    """Why a job failed."""

    code: str
    message: str
    param: str | None


class OpenAIJob(Resource):
    """A job, as OpenAI shows one."""

    id: str
    object: Literal["fine_tuning.job"] = "fine_tuning.job"
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    """Directory of the last checkpoint, once the job has succeeded."""
    organization_id: str = "rlharvest"
    result_files: tuple[str, ...] = ()
    status: str
    trained_tokens: int | None
    training_file: str
    validation_file: str | None = None
    hyperparameters: Json
    method: Json
    seed: int
    user_provided_suffix: str | None
    metadata: dict[str, str]
    error: OpenAIError | None
    estimated_finish: int | None = None
    integrations: tuple[Json, ...] = ()
    rlharvest: JobResource
    """The job in our words."""


class OpenAIEvent(Resource):
    """An event, as OpenAI shows one."""

    id: str
    object: Literal["fine_tuning.job.event"] = "fine_tuning.job.event"
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str
    type: Literal["message"] = "message"
    data: Json


class OpenAICheckpoint(Resource):
    """A checkpoint, as OpenAI shows one."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"] = "fine_tuning.job.checkpoint"
    created_at: int
    fine_tuning_job_id: str
    fine_tuned_model_checkpoint: str
    step_number: int
    metrics: Json


def spec(request: Json) -> Json:
    """Return the job spec that a create request asks for, not yet checked.

    Raises:
        InvalidField: something in it has no counterpart, or is given twice.
    """
    for name, value in request.items():
        if name not in _KNOWN and value not in (None, [], {}):
            raise InvalidField(name, value, "not offered here", f"Use {', '.join(_KNOWN)}.")
    own = request.get("rlharvest") or {}
    if not isinstance(own, dict):
        raise InvalidField("rlharvest", own, "not a mapping", "Give fields of the job, e.g. {'rewards': [...]}.")
    mapped: Json = {}
    if (training_file := request.get("training_file")) is not None:
        mapped["dataset"] = {"path": _path(training_file)}
    for name, ours in (("model", "model"), ("seed", "seed"), ("suffix", "name"), ("metadata", "metadata")):
        if request.get(name) is not None:
            mapped[ours] = request[name]
    return _merge(_merge(mapped, _method(request.get("method")), ""), own, "")


def _path(training_file: Any) -> str:
    if not isinstance(training_file, str):
        raise InvalidField("training_file", training_file, "not a string", "Give the path of a dataset.")
    if training_file.startswith("file-"):
        raise InvalidField(
            "training_file",
            training_file,
            "file ids need an upload, which this server does not take",
            "Give the path of the dataset on the server, as dataset.path has it.",
        )
    return training_file


def _method(method: Any) -> Json:
    """Return what `method` says about the spec."""
    if not isinstance(method, dict) or method.get("type") != "reinforcement":
        kind = method.get("type") if isinstance(method, dict) else method
        raise InvalidField("method.type", kind, "only reinforcement is offered", "Use {'type': 'reinforcement'}.")
    if unknown := set(method) - {"type", "reinforcement"}:
        name = min(unknown)
        raise InvalidField(f"method.{name}", method[name], "not offered here", "Use `reinforcement` alone.")
    block = method.get("reinforcement") or {}
    if not isinstance(block, dict):
        raise InvalidField("method.reinforcement", block, "not a mapping", "Give `grader` and `hyperparameters`.")
    result: Json = {}
    if block.get("grader") is not None:
        result["rewards"] = [_grader(block["grader"])]
    if unknown := set(block) - {"grader", "hyperparameters"}:
        name = min(unknown)
        raise InvalidField(f"method.reinforcement.{name}", block[name], "not offered here", "Leave it out.")
    for name, value in (block.get("hyperparameters") or {}).items():
        if value in _AUTOMATIC:
            continue
        if name != "batch_size":
            raise InvalidField(
                f"method.reinforcement.hyperparameters.{name}",
                value,
                "has no counterpart",
                "Leave it at auto and set algorithm, sampling or limits in the `rlharvest` block.",
            )
        result["algorithm"] = {"prompts_per_step": value}
    return result


def _grader(grader: Any) -> Json:
    """Return the reward that a grader is: comparing for equality is offered."""
    if isinstance(grader, dict) and grader.get("type") == "string_check" and grader.get("operation") == "eq":
        return {"builtin": "exact_match"}
    kind = grader.get("type") if isinstance(grader, dict) else grader
    raise InvalidField(
        "method.reinforcement.grader",
        kind,
        "of the graders only string_check with operation eq is offered",
        "Leave it out and set `rewards` in the `rlharvest` block.",
    )


def _merge(first: Json, second: Json, path: str) -> Json:
    merged = dict(first)
    for key, value in second.items():
        where = f"{path}{key}"
        if key not in merged:
            merged[key] = value
        elif isinstance(merged[key], dict) and isinstance(value, dict):
            merged[key] = _merge(merged[key], value, f"{where}.")
        elif merged[key] != value:
            raise InvalidField(f"rlharvest.{where}", value, "given twice with two values", "Remove one of them.")
    return merged


def job(resource: JobResource) -> OpenAIJob:
    """Return a job as OpenAI shows it."""
    spec = resource.spec
    hyperparameters = {"batch_size": spec["algorithm"]["prompts_per_step"], "n_epochs": "auto"}
    failed = resource.error is not None or resource.status == "failed"
    return OpenAIJob(
        id=resource.id,
        created_at=int(resource.created_at),
        finished_at=int(resource.finished_at) if resource.finished_at is not None else None,
        model=resource.model,
        fine_tuned_model=resource.latest_checkpoint if resource.status == "succeeded" else None,
        status=STATUSES.get(resource.status, resource.status),
        trained_tokens=resource.progress.trained_tokens,
        training_file=spec["dataset"]["path"],
        hyperparameters=hyperparameters,
        method={"type": "reinforcement", "reinforcement": {"hyperparameters": hyperparameters}},
        seed=spec["seed"],
        user_provided_suffix=resource.name or None,
        metadata=resource.metadata,
        error=OpenAIError(code=resource.status_detail.reason, message=resource.error or "", param=None)
        if failed
        else None,
        rlharvest=resource,
    )


def event(row: Event) -> OpenAIEvent:
    """Return an event as OpenAI shows it."""
    return OpenAIEvent.model_validate(
        {
            "id": row.id,
            "created_at": int(row.at),
            "level": row.level if row.level in ("info", "warn", "error") else "info",
            "message": row.message,
            "data": {"type": row.type, "source": row.source, **row.data},
        }
    )


def checkpoint(row: CheckpointRow) -> OpenAICheckpoint:
    """Return a checkpoint as OpenAI shows it."""
    return OpenAICheckpoint(
        id=row.id,
        created_at=int(row.at),
        fine_tuning_job_id=row.job,
        fine_tuned_model_checkpoint=row.path,
        step_number=row.step,
        metrics={"step": row.step, **row.metrics},
    )
