"""History for drafts: what a job sampled for a prompt in earlier epochs, given along when the prompt is sampled again.

There is no store of its own: the finished and scored responses are in SQL, immutable, and are read back when a group of
a later epoch is admitted. So a crash loses nothing of it, and it goes when the job's samples go.

Invariants: a group is given only responses to its own prompt, of earlier epochs of the same job, at most GROUP_BYTES,
the newest epoch and the highest reward first; nothing is kept of a group that left the ledger; together no more than
CACHE_BYTES are kept, the groups admitted last go without. A round looks at the groups that were admitted since the one
before, not at all that are live.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from itertools import groupby, islice

from rlharvest.ledger.response import Group
from rlharvest.spans import as_ids
from rlharvest.speculation.history import PastResponse, prompt_key
from rlharvest.speculation.segment import Segment, pack
from rlharvest.v1 import fleet_pb2

from rlharvest_coordinator.scope import Scope
from rlharvest_coordinator.store import history
from rlharvest_coordinator.store.history import Past

GROUP_BYTES = 2 << 20
"""Most token ids that a group is given."""

INLINE_BYTES = 64 << 10
"""Segments of one group travel with its assignments up to this size; larger ones are fetched by the worker."""

MESSAGE_BYTES = 128 << 10
"""Most segments in one message of assignments; those of further groups are fetched."""

CACHE_BYTES = 64 << 20
"""Segments kept for a job's live groups."""

MOST_GROUPS = 256
"""Looked up in one query."""


class History:
    """What one job's live groups can draft from."""

    def __init__(self, scope: Scope) -> None:
        self._scope = scope
        self._segments: dict[int, list[bytes]] = {}
        """Of each group that was looked up."""
        self._held = 0
        self._next: int | None = None
        """The first ordinal that was not seen yet; None: nothing was."""
        self._fresh: deque[int] = deque()
        """Groups that were seen and not looked up."""

    def recovered(self) -> None:
        """The book is another one, whose groups may be any."""
        self._next = None

    def left(self, ordinal: int) -> None:
        """A group left the ledger."""
        self._held -= sum(map(len, self._segments.pop(ordinal, ())))

    async def follow(self) -> None:
        """Look up what new groups can draft from."""
        wanted = self._scope.spec.rollout.speculation
        if wanted.enabled == "off" or not wanted.history_epochs:
            return
        self._see()
        ordinals = list(islice(self._fresh, MOST_GROUPS))
        live = self._scope.book.groups
        fresh = [live[ordinal] for ordinal in ordinals if ordinal in live]
        if fresh:
            await self._look_up(fresh, wanted.history_epochs)
        # Only now: if SQL cannot be asked, they are asked for again.
        for _ in ordinals:
            self._fresh.popleft()

    def _see(self) -> None:
        """Take note of the groups that came since the last call."""
        book = self._scope.book
        if self._next is None:
            for gone in self._segments.keys() - book.groups.keys():
                self.left(gone)
            new: Iterable[int] = (ordinal for ordinal in book.groups if ordinal not in self._segments)
            self._fresh.clear()
        else:
            new = range(self._next, book.next_group)
        self._fresh += [ordinal for ordinal in new if ordinal in book.groups and book.groups[ordinal].data_epoch > 0]
        self._next = book.next_group

    async def _look_up(self, fresh: Sequence[Group], epochs: int) -> None:
        newest = max(group.data_epoch for group in fresh)
        found = await history.past(
            self._scope.sessions,
            self._scope.id,
            {group.prompt for group in fresh},
            first_epoch=max(0, min(group.data_epoch for group in fresh) - epochs),
            below_epoch=newest,
        )
        by_prompt: dict[int, list[Past]] = {}
        for one in found:
            by_prompt.setdefault(one.prompt, []).append(one)
        for group in fresh:
            least = group.data_epoch - epochs
            own = [one for one in by_prompt.get(group.prompt, ()) if least <= one.epoch < group.data_epoch]
            prompt = prompt_key(self._scope.prepared.dataset.prompt_ids(group.prompt)) if own else b""
            segments = segments_of(prompt, own)
            size = sum(map(len, segments))
            if self._held + size > CACHE_BYTES:
                segments, size = [], 0
            if group.ordinal not in self._scope.book.groups:
                continue  # it left meanwhile
            self._segments[group.ordinal] = segments
            self._held += size

    def segments(self, group: int) -> list[bytes]:
        """Return the history segments of a live group."""
        return self._segments.get(group, [])

    def sources(self, groups: Iterable[int]) -> list[fleet_pb2.DraftSource]:
        """Return what a message of assignments says of the history of its groups."""
        sources, room = [], MESSAGE_BYTES
        for group in sorted(set(groups)):
            segments = self.segments(group)
            size = sum(map(len, segments))
            if not size:
                continue
            inline = size <= min(INLINE_BYTES, room)
            room -= size if inline else 0
            sources.append(
                fleet_pb2.DraftSource(group=group, segments=segments if inline else (), by_reference=not inline)
            )
        return sources


def segments_of(prompt: bytes, past: Sequence[Past], *, most_bytes: int = GROUP_BYTES) -> list[bytes]:
    """Return responses as segments, one for each epoch; what is above `most_bytes` of token ids is left out.

    Args:
        prompt: key of the prompt.
        past: newest epoch first, best reward first.
    """
    segments = []
    for epoch, group in groupby(past, key=lambda one: one.epoch):
        responses = []
        for one in group:
            if len(one.ids) > most_bytes:
                continue
            most_bytes -= len(one.ids)
            responses.append(PastResponse(ids=as_ids(one.ids), epoch=epoch, version=one.version, reward=one.reward))
        if responses:
            segments.append(pack(Segment(prompt=prompt, responses=tuple(responses))))
    return segments
