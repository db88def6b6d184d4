"""Spans in memory, and their columnar form on the wire.

Invariants: `len(ids) == len(logprobs) == sum of the runs`; every log-probability is finite and not above a small rounding
error over 0; a span without tokens has a finish. What breaks one is CorruptData when it comes from the wire, and nothing
of that message is used.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import IntEnum

import numpy as np
import numpy.typing as npt

from rlharvest.errors import CorruptData
from rlharvest.v1 import spans_pb2

Ids = npt.NDArray[np.uint32]
Logprobs = npt.NDArray[np.float32]

MAX_LOGPROB = 1e-3
"""Log-probabilities are at most 0; kernels round."""


class Finish(IntEnum):
    """Why a response ended."""

    NONE = spans_pb2.FINISH_NONE
    """It goes on."""

    EOS = spans_pb2.FINISH_EOS
    """An end-of-sequence token, which is its last one."""

    STOP = spans_pb2.FINISH_STOP
    """A stop string."""

    LENGTH = spans_pb2.FINISH_LENGTH
    """Its token budget is used up."""


@dataclass(frozen=True, slots=True)
class Run:
    """`n` tokens in a row that one version sampled."""

    n: int
    version: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Consecutive new tokens of one response, sampled by one attempt."""

    handle: int
    attempt: int
    offset: int
    """Index of the first token in the response (0: the first one after the prompt)."""
    ids: Ids
    """Shape (n,)."""
    logprobs: Logprobs
    """Shape (n,), natural log, of the distribution that was sampled from."""
    runs: tuple[Run, ...]
    finish: Finish = Finish.NONE

    @property
    def end(self) -> int:
        """Length of the response after this span."""
        return self.offset + len(self.ids)


def as_ids(data: bytes) -> Ids:
    """Return token ids from little-endian u32 bytes."""
    if len(data) % 4:
        raise CorruptData(f"token ids are {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype="<u4").astype(np.uint32, copy=False)


def as_logprobs(data: bytes) -> Logprobs:
    """Return log-probabilities from little-endian f32 bytes."""
    if len(data) % 4:
        raise CorruptData(f"log-probabilities are {len(data)} bytes, not a multiple of 4")
    return np.frombuffer(data, dtype="<f4").astype(np.float32, copy=False)


def ids_bytes(ids: Sequence[int] | Ids) -> bytes:
    """Return token ids as little-endian u32 bytes."""
    return np.asarray(ids, dtype="<u4").tobytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class Flush:
    """All that one worker publishes at a time."""

    worker: str
    incarnation: int
    number: int
    spans: tuple[Span, ...] = ()
    final: bool = False
    numerics_key: str = ""


def pack(flush: Flush) -> bytes:
    """Return the TokenSpans message of a flush."""
    spans = flush.spans
    message = spans_pb2.TokenSpans(
        worker=flush.worker,
        incarnation=flush.incarnation,
        flush=flush.number,
        final=flush.final,
        numerics_key=flush.numerics_key,
        handle=[span.handle for span in spans],
        attempt=[span.attempt for span in spans],
        offset=[span.offset for span in spans],
        n=[len(span.ids) for span in spans],
        finish=[span.finish.value for span in spans],
        ids=b"".join(ids_bytes(span.ids) for span in spans),
        logprobs=b"".join(np.asarray(span.logprobs, dtype="<f4").tobytes() for span in spans),
        run_n=[run.n for span in spans for run in span.runs],
        run_version=[run.version for span in spans for run in span.runs],
    )
    return message.SerializeToString()


def unpack(data: bytes) -> Flush:
    """Return the flush of a TokenSpans message.

    Raises:
        CorruptData: it is no such message, or its columns do not fit together; names the column.
    """
    message = spans_pb2.TokenSpans()
    try:
        message.ParseFromString(data)
    except Exception as error:  # protobuf's DecodeError has no public base
        raise CorruptData(f"not a TokenSpans message: {error}") from error
    rows = len(message.handle)
    for column in ("attempt", "offset", "n", "finish"):
        if len(getattr(message, column)) != rows:
            raise CorruptData(f"TokenSpans.{column} has {len(getattr(message, column))} rows, handle has {rows}")
    total = sum(message.n)
    ids, logprobs = as_ids(message.ids), as_logprobs(message.logprobs)
    if len(ids) != total or len(logprobs) != total:
        raise CorruptData(f"TokenSpans.n sums to {total}, but there are {len(ids)} ids and {len(logprobs)} logprobs")
    if total and not bool(np.isfinite(logprobs).all() and (logprobs <= MAX_LOGPROB).all()):
        raise CorruptData("TokenSpans.logprobs holds a value that is not finite or above 0")
    if len(message.run_n) != len(message.run_version):
        raise CorruptData(f"TokenSpans has {len(message.run_n)} run_n and {len(message.run_version)} run_version")
    runs = iter([Run(n, version) for n, version in zip(message.run_n, message.run_version, strict=True)])
    spans = []
    at = 0
    for row in range(rows):
        n = message.n[row]
        own: list[Run] = []
        left = n
        while left > 0:
            run = next(runs, None)
            if run is None or run.n == 0 or run.n > left:
                raise CorruptData(f"TokenSpans version runs do not cover row {row} of {n} tokens exactly")
            own.append(run)
            left -= run.n
        try:
            finish = Finish(message.finish[row])
        except ValueError as error:
            raise CorruptData(f"TokenSpans.finish[{row}] = {message.finish[row]} is not a finish") from error
        if n == 0 and finish is Finish.NONE:
            raise CorruptData(f"TokenSpans row {row} has neither tokens nor a finish")
        spans.append(
            Span(
                handle=message.handle[row],
                attempt=message.attempt[row],
                offset=message.offset[row],
                ids=ids[at : at + n],
                logprobs=logprobs[at : at + n],
                runs=tuple(own),
                finish=finish,
            )
        )
        at += n
    if next(runs, None) is not None:
        raise CorruptData("TokenSpans has more version runs than tokens")
    return Flush(
        worker=message.worker,
        incarnation=message.incarnation,
        number=message.flush,
        spans=tuple(spans),
        final=message.final,
        numerics_key=message.numerics_key,
    )


def merge_runs(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Return the runs with neighbours of the same version made one."""
    merged: list[Run] = []
    for run in runs:
        if merged and merged[-1].version == run.version:
            merged[-1] = Run(merged[-1].n + run.n, run.version)
        elif run.n:
            merged.append(run)
    return tuple(merged)


def skip_runs(runs: Sequence[Run], n: int) -> tuple[Run, ...]:
    """Return the runs without their first `n` tokens."""
    kept = []
    for run in runs:
        dropped = min(n, run.n)
        n -= dropped
        if run.n > dropped:
            kept.append(Run(run.n - dropped, run.version))
    return tuple(kept)


@dataclass(slots=True)
class Tokens:
    """Tokens of a response as they come together."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)

    def extend(self, span: Span) -> None:
        """Append a span that starts at the present length."""
        if span.offset != len(self.ids):
            raise CorruptData(f"a span at {span.offset} does not continue a response of {len(self.ids)} tokens")
        self.ids.extend(span.ids.tolist())
        self.logprobs.extend(span.logprobs.tolist())
        self.runs = list(merge_runs([*self.runs, *span.runs]))
