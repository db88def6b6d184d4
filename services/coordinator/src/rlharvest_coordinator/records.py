"""Groups and responses as SQL keeps them: made from what the ledger holds, whole, before it forgets it."""

from __future__ import annotations

from collections.abc import Sequence

from rlharvest.ids import response_id
from rlharvest.ledger.response import Group as LiveGroup
from rlharvest.ledger.response import Response
from rlharvest.spans import ids_bytes

from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import groups
from rlharvest_coordinator.store.values import storable
from rlharvest_coordinator.tables import Group, Sample


def group_row(
    scope: Scope, group: LiveGroup, responses: Sequence[Response], *, state: str, reason: str | None = None
) -> Group:
    """Return the row of a group; only an accepted one has rewards.

    Args:
        reason: why it is dropped.
    """
    rewards = [response.score.reward for response in responses if response.score is not None]
    scored = state == groups.ACCEPTED
    mean = sum(rewards) / len(rewards) if scored else None
    versions = {run.version for response in responses for run in response.runs}
    return Group(
        job=scope.id,
        ordinal=group.ordinal,
        state=state,
        reason=reason,
        prompt=group.prompt,
        data_epoch=group.data_epoch,
        tokens=sum(response.length for response in responses),
        reward_mean=mean,
        reward_std=(sum((value - mean) ** 2 for value in rewards) / len(rewards)) ** 0.5 if mean is not None else None,
        # Oldest by optimizer step: after a trainer's resume a newer version may stand for an earlier step.
        oldest_version=min(versions, key=lambda version: (scope.versions.get(version, 0), version), default=None),
        newest_version=max(versions, default=None),
        masked=False,
        at=scope.clock.time(),
    )


def sample_row(scope: Scope, group: LiveGroup, response: Response) -> Sample:
    """Return the row of a response."""
    pieces, at = [], 0
    for piece in response.pieces:
        pieces.append([at, piece.n, str(piece.attempt), piece.worker])
        at += piece.n
    score = response.score
    return Sample(
        job=scope.id,
        handle=response.handle,
        response_id=response_id(scope.id, response.handle),
        group=group.ordinal,
        finish=response.finish.name.lower(),
        ids=ids_bytes(response.ids),
        logprobs=response.logprobs.astype("<f4").tobytes(),
        runs=[[run.n, run.version] for run in response.runs],
        pieces=pieces,
        prompt_text=storable(scope.prepared.dataset.prompt_text(group.prompt)),
        text=storable(scope.prepared.tokenizer.decode(response.ids.tolist())),
        reward=score.reward if score is not None else 0.0,
        components=[
            [item.name, item.value if item.HasField("value") else None, item.weight]
            for item in (score.components if score is not None else ())
        ],
        at=scope.clock.time(),
    )
