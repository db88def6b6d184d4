"""Asking for rewards: what the reward service is sent for a finished response, and what becomes of its answer."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from rlharvest.ids import response_id
from rlharvest.jobs.model import JobSpec
from rlharvest.ledger.response import Group, Response
from rlharvest.spans import Finish, ids_bytes
from rlharvest.v1 import scores_pb2

from rlharvest_coordinator.data.prepare import Prepared

ASK_AGAIN_S = 30.0
"""On top of the rewards' own time limits: without an answer for this long the question is put again."""


@dataclass(slots=True)
class Questions:
    """Which responses of a job a reward was asked for."""

    spec: JobSpec
    asked: dict[int, tuple[float, int]] = field(default_factory=dict)
    """handle -> (when, how often)."""

    @property
    def patience_s(self) -> float:
        """How long an answer may take."""
        return ASK_AGAIN_S + 2 * sum(reward.timeout_s for reward in self.spec.rewards)

    def due(self, handle: int, now: float) -> int | None:
        """Return the number of the try that is due now for a finished response, or None."""
        if handle not in self.asked:
            return 1
        when, tries = self.asked[handle]
        return tries + 1 if now - when > self.patience_s else None


def request(
    job: str, spec: JobSpec, prepared: Prepared, group: Group, response: Response, *, step: int, question: str
) -> scores_pb2.ScoreRequest:
    """Return the question for a finished response."""
    row = group.prompt
    ids = response.ids
    return scores_pb2.ScoreRequest(
        job=job,
        handle=response.handle,
        response_id=response_id(job, response.handle),
        reward_digest=prepared.rewards_digest,
        rewards_json=json.dumps([reward.model_dump(mode="json") for reward in spec.rewards]),
        prompt_json=prepared.dataset.prompt_json(row),
        prompt_text=prepared.dataset.prompt_text(row),
        completion=prepared.tokenizer.decode(ids.tolist()),
        prompt_ids=ids_bytes(prepared.dataset.prompt_ids(row)),
        completion_ids=ids_bytes(ids),
        columns_json=json.dumps(prepared.dataset.columns(row), ensure_ascii=False),
        truncated=response.finish is Finish.LENGTH,
        step=step,
        question=question,
        attempt=response.writer,
    )
