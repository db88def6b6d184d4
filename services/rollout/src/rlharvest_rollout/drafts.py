"""History that comes with assignments.

Invariant: history that does not verify is counted and left out; the response starts without it, since drafts change nothing
but the time.
"""

from __future__ import annotations

from collections.abc import Iterable

import structlog
from rlharvest.errors import CorruptData
from rlharvest.speculation.history import DraftSource, PastResponse
from rlharvest.speculation.segment import unpack
from rlharvest.v1 import fleet_pb2

from rlharvest_rollout import metrics

log = structlog.get_logger(__name__)


def source_of(segments: Iterable[bytes]) -> DraftSource | None:
    """Return the responses of history segments; None if there are none."""
    responses: list[PastResponse] = []
    for segment in segments:
        try:
            responses += unpack(segment).responses
        except CorruptData as error:
            metrics.REFUSALS.labels("history").inc()
            log.warning("history.refused", error=str(error))
    return DraftSource(responses=tuple(responses)) if responses else None


def sources_of(message: fleet_pb2.Assignments) -> tuple[dict[int, DraftSource], set[int]]:
    """Return the history that came along, by group, and the groups whose history is to be fetched."""
    found = {one.group: source_of(one.segments) for one in message.draft_sources if not one.by_reference}
    fetched = {one.group for one in message.draft_sources if one.by_reference}
    return {group: source for group, source in found.items() if source is not None}, fetched
