"""The unmodified client of OpenAI drives our jobs."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
from rlharvest.errors import InvalidField
from rlharvest.jobs.state import Move
from rlharvest_coordinator.api import openai as mapping
from rlharvest_coordinator.store import checkpoints, events, jobs
from rlharvest_coordinator.store.events import NewEvent

from .conftest import Served

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import openai

METHOD: dict[str, Any] = {
    "type": "reinforcement",
    "reinforcement": {
        "grader": {"type": "string_check", "name": "g", "input": "a", "reference": "b", "operation": "eq"},
        "hyperparameters": {"batch_size": 4, "n_epochs": "auto"},
    },
}


def test_create_follow_pause_resume_cancel(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        api = client.fine_tuning.jobs
        job = api.create(
            model="m",
            training_file="d.jsonl",
            method=METHOD,
            seed=3,
            suffix="mine",
            metadata={"a": "b"},
            extra_body={"rlharvest": {"limits": {"max_steps": 7}}},
        )
        assert (job.status, job.seed, job.user_provided_suffix) == ("validating_files", 3, "mine")
        ours = job.model_extra["rlharvest"]
        assert ours["spec"]["limits"]["max_steps"] == 7
        assert ours["spec"]["algorithm"]["prompts_per_step"] == 4
        assert ours["spec"]["rewards"][0]["builtin"] == "exact_match"

        assert served.sessions is not None
        served.run(jobs.move(served.sessions, job.id, Move.VALIDATED, now=1.0))
        assert api.pause(job.id).status == "paused"
        assert api.resume(job.id).status == "queued"
        served.run(jobs.claim(served.sessions, trainer="t", now=2.0))
        assert api.retrieve(job.id).status == "running"

        more = [
            NewEvent(id=f"evt_{n}", job=job.id, level="warn", type="t", message=str(n), at=n, source="s")
            for n in range(5)
        ]
        served.run(events.append(served.sessions, more))
        messages = [event.message for event in api.list_events(job.id, limit=2)]
        assert messages[:5] == ["4", "3", "2", "1", "0"], "the client walks the pages, newest first"
        for step in (1, 2, 3):
            served.run(
                checkpoints.record(
                    served.sessions,
                    job.id,
                    step,
                    version=step,
                    path=f"c{step}",
                    digest="d",
                    metrics={"kl": 0.1},
                    now=1.0,
                )
            )
        found = list(api.checkpoints.list(job.id, limit=2))
        assert [checkpoint.step_number for checkpoint in found] == [3, 2, 1]
        assert found[0].fine_tuned_model_checkpoint == "c3"

        assert api.cancel(job.id).status == "running", "the trainer still has to let go"
        served.run(jobs.move(served.sessions, job.id, Move.CANCELLED, now=3.0))
        assert api.retrieve(job.id).status == "cancelled"
        for _ in range(3):
            api.create(model="m", training_file="d.jsonl", method=METHOD)
        assert len(list(api.list(limit=2))) == 4


def test_its_errors_are_the_clients_own(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.NotFoundError, match="there is no job"):
            client.fine_tuning.jobs.retrieve("rljob_none")
        with pytest.raises(openai.BadRequestError) as refused:
            client.fine_tuning.jobs.create(model="m", training_file="file-abc", method=METHOD)
        assert (refused.value.param, refused.value.code) == ("training_file", "invalid_value")
        job = client.fine_tuning.jobs.create(model="m", training_file="d.jsonl", method=METHOD)
        with pytest.raises(openai.ConflictError):
            client.fine_tuning.jobs.resume(job.id)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"method": {"type": "supervised"}}, "method.type"),
        ({"method": None}, "method.type"),
        ({"method": {"type": "reinforcement", "dpo": {}}}, "method.dpo"),
        ({"validation_file": "v"}, "validation_file"),
        ({"training_file": 3}, "training_file"),
        ({"rlharvest": {"model": "other"}}, "rlharvest.model"),
        ({"rlharvest": {"dataset": {"path": "other"}}}, "rlharvest.dataset.path"),
        ({"rlharvest": []}, None),
        ({"rlharvest": [1]}, "rlharvest"),
        (
            {"method": {"type": "reinforcement", "reinforcement": {"hyperparameters": {"n_epochs": 3}}}},
            "method.reinforcement.hyperparameters.n_epochs",
        ),
        (
            {"method": {"type": "reinforcement", "reinforcement": {"grader": {"type": "python"}}}},
            "method.reinforcement.grader",
        ),
    ],
)
def test_what_has_no_counterpart_is_refused_by_name(change: dict[str, Any], field: str | None) -> None:
    request = {"model": "m", "training_file": "d.jsonl", "method": METHOD, **change}
    if field is None:
        mapping.spec(request)
        return
    with pytest.raises(InvalidField) as refused:
        mapping.spec(request)
    assert refused.value.field == field
