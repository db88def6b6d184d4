"""History as bytes: the finished responses of one prompt, immutable, checked by their digest.

Columnar, like token spans: a digest of DIGEST_BYTES, then a HistorySegment message. Equal segments have equal bytes.
Invariants: bytes that do not verify are CorruptData and nothing of them is used; a response has at least one token; a
reward is finite.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import accumulate

from google.protobuf.message import DecodeError

from rlharvest.errors import CorruptData
from rlharvest.spans import as_ids, ids_bytes
from rlharvest.speculation.history import KEY_BYTES, PastResponse
from rlharvest.v1 import history_pb2

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Responses to one prompt."""

    prompt: bytes
    """Its key, see `history.prompt_key`."""
    responses: tuple[PastResponse, ...]


def pack(segment: Segment) -> bytes:
    """Return a segment as bytes.

    Raises:
        ValueError: it breaks an invariant.
    """
    responses = segment.responses
    if len(segment.prompt) != KEY_BYTES:
        raise ValueError(f"a prompt's key has {KEY_BYTES} bytes, not {len(segment.prompt)}")
    if not all(len(response.ids) for response in responses):
        raise ValueError("a response has no tokens")
    if not all(response.reward is None or math.isfinite(response.reward) for response in responses):
        raise ValueError("a reward is not finite")
    body = history_pb2.HistorySegment(
        prompt=segment.prompt,
        n=[len(response.ids) for response in responses],
        epoch=[response.epoch for response in responses],
        version=[response.version for response in responses],
        reward=[math.nan if response.reward is None else response.reward for response in responses],
        ids=b"".join(ids_bytes(response.ids) for response in responses),
    ).SerializeToString(deterministic=True)
    return _digest(body) + body


def unpack(data: bytes) -> Segment:
    """Return the segment of bytes.

    Raises:
        CorruptData: they do not verify, or their columns do not fit together.
    """
    digest, body = data[:DIGEST_BYTES], data[DIGEST_BYTES:]
    if _digest(body) != digest:
        raise CorruptData(f"a history segment of {len(data)} bytes does not match its digest")
    message = history_pb2.HistorySegment()
    try:
        message.ParseFromString(body)
    except DecodeError as error:
        raise CorruptData(f"not a HistorySegment message: {error}") from error
    counts, ids = list(message.n), as_ids(message.ids)
    columns: Sequence[tuple[str, int]] = (
        ("epoch", len(message.epoch)),
        ("version", len(message.version)),
        ("reward", len(message.reward)),
    )
    for name, rows in columns:
        if rows != len(counts):
            raise CorruptData(f"HistorySegment.{name} has {rows} rows, n has {len(counts)}")
    if len(message.prompt) != KEY_BYTES or not all(counts) or sum(counts) != len(ids):
        raise CorruptData("HistorySegment does not hold what its columns say")
    if any(math.isinf(reward) for reward in message.reward):
        raise CorruptData("HistorySegment.reward holds a value that is not finite")
    starts = list(accumulate(counts, initial=0))
    return Segment(
        prompt=message.prompt,
        responses=tuple(
            PastResponse(
                ids=ids[start : start + n],
                epoch=epoch,
                version=version,
                reward=None if math.isnan(reward) else reward,
            )
            for start, n, epoch, version, reward in zip(
                starts, counts, message.epoch, message.version, message.reward, strict=False
            )
        ),
    )


def _digest(body: bytes) -> bytes:
    return blake2b(body, digest_size=DIGEST_BYTES, person=b"rlharvest histor").digest()
