"""Which assignments a worker takes: a pure decision, and the translation from the wire.

Invariants: an attempt that was taken once is never started a second time, however often it is sent; an older attempt
than one seen is refused; nothing starts below its minimal version; no more run than there are slots. All this holds for
the responses that are held and for the REMEMBERED times `slots` newest others: an order that comes later than that costs
its tokens, which the ledger refuses, and nothing else.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlharvest.engine import Request, Sampling
from rlharvest.ledger.response import epoch_of
from rlharvest.spans import as_ids
from rlharvest.speculation.history import DraftSource
from rlharvest.v1 import fleet_pb2

REMEMBERED = 8
"""Responses whose attempts are remembered after they were handed over, for each slot."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What becomes of an Assignments message."""

    take: tuple[fleet_pb2.Assignment, ...] = ()
    refused: tuple[int, ...] = ()
    reason: str = ""
    """Why some were refused, for people."""


@dataclass(slots=True)
class Admission:
    """Remembers the attempts of one job."""

    slots: int
    _newest: dict[int, int] = field(default_factory=dict)

    def judge(
        self, message: fleet_pb2.Assignments, *, held: Mapping[int, int], running: int, version: int | None
    ) -> Verdict:
        """Return which assignments start now, which are refused; those that were taken before are in neither.

        Args:
            held: attempt of each response held.
            running: responses that generate.
            version: that samples now.
        """
        take: list[fleet_pb2.Assignment] = []
        refused: list[int] = []
        reasons: dict[str, None] = {}
        for one in message.assignments:
            newest = self._newest.get(one.handle, -1)
            if one.attempt == newest:
                continue
            if epoch_of(one.attempt) > message.epoch:
                reason = "its attempt is of a later epoch than its order"
            elif one.attempt < newest:
                reason = "a newer attempt was seen"
            elif version is None:
                reason = "no version is loaded"
            elif version < one.min_version:
                reason = f"version {version} is loaded, {one.min_version} is asked for"
            elif running >= self.slots and one.handle not in held:
                reason = f"all {self.slots} slots are taken"
            else:
                take.append(one)
                self._newest.pop(one.handle, None)  # so that the oldest is the first
                self._newest[one.handle] = one.attempt
                running += one.handle not in held
                continue
            refused.append(one.handle)
            reasons[reason] = None
        self._forget({*held, *(one.handle for one in take)})
        return Verdict(tuple(take), tuple(refused), "; ".join(reasons))

    def _forget(self, held: set[int]) -> None:
        """Keep no more than it takes to know an order that comes again."""
        spare = len(self._newest) - len(held) - REMEMBERED * self.slots
        if spare > 0:
            over = itertools.islice((handle for handle in self._newest if handle not in held), spare)
            for handle in list(over):
                del self._newest[handle]


def sampling_of(message: fleet_pb2.Sampling) -> Sampling:
    """Return the sampling parameters of a job."""
    return Sampling(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        min_p=message.min_p,
        eos_ids=frozenset(message.eos_ids),
        stop=tuple(message.stop),
        vocab=message.vocab,
    )


def request_of(
    assignment: fleet_pb2.Assignment,
    sampling: Sampling,
    *,
    prompt: bytes,
    prefix: bytes,
    drafts: DraftSource | None = None,
) -> Request:
    """Return an engine's request; `prompt` and `prefix` are little-endian u32.

    Raises:
        CorruptData: they are not whole tokens.
    """
    return Request(
        handle=assignment.handle,
        attempt=assignment.attempt,
        group=assignment.group,
        seed=assignment.seed,
        prompt=as_ids(prompt),
        prefix=as_ids(prefix),
        budget=assignment.budget,
        sampling=sampling,
        drafts=drafts,
    )
