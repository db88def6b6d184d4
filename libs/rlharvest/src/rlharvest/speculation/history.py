"""Responses of the past, as an engine is given them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

from rlharvest.spans import Ids, ids_bytes

KEY_BYTES = 16


def prompt_key(prompt: Sequence[int] | Ids) -> bytes:
    """Return what a prompt is known by, KEY_BYTES long: a digest of its token ids."""
    return blake2b(ids_bytes(prompt), digest_size=KEY_BYTES, person=b"rlharvest prompt").digest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PastResponse:
    """A response that is finished."""

    ids: Ids
    epoch: int
    """Of the dataset, when it was sampled."""
    version: int
    """That sampled its last token."""
    reward: float | None = None
    """None: not scored."""


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False, kw_only=True)
class DraftSource:
    """Responses of earlier epochs to one prompt. Its identity counts: siblings share one object."""

    responses: tuple[PastResponse, ...] = ()
