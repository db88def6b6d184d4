"""Which accepted groups form the next batch.

In admission order batch t is the first G groups that are neither dropped nor in an earlier batch; a group may be committed
as soon as it is certain to be among them, whatever happens to the ones before it, so that the trainer can start early.
Invariants (property-tested): a batch has exactly G groups; a committed group never leaves its batch; the membership of
every batch depends on which groups were dropped alone, not on the order in which the others finished.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal


def commit(
    *,
    running: Collection[int],
    accepted: Collection[int],
    committed: int,
    size: int,
    order: Literal["admission", "completion"] = "admission",
) -> list[int]:
    """Return the ordinals of groups to commit to the open batch now, in order.

    Args:
        running: ordinals of groups that may still be accepted or dropped.
        accepted: ordinals of complete groups that are in no batch yet; for `completion`, in order of completion.
        committed: groups of the open batch that are committed already.
        size: groups a batch.
    """
    room = size - committed
    if room <= 0:
        return []
    if order == "completion":
        return list(accepted)[:room]
    ready = set(accepted)
    # The first `room` of the groups that are alive are certain: a drop among them only moves the later ones forward.
    return [ordinal for ordinal in sorted([*running, *accepted])[:room] if ordinal in ready]
