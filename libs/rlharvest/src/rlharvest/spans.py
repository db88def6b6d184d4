"""Spans in memory, and their columnar form on the wire.

Invariants: `len(ids) == len(logprobs) == sum of the runs`; every log-probability is finite and not above a small rounding
error over 0; a span without tokens has a finish. What breaks one is CorruptData when it comes from the wire, and nothing
of that message is used.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import accumulate
from operator import or_

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

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


def logprobs_bytes(logprobs: Logprobs) -> bytes:
    """Return log-probabilities as little-endian f32 bytes."""
    return np.asarray(logprobs, dtype="<f4").tobytes()


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
        logprobs=b"".join(logprobs_bytes(span.logprobs) for span in spans),
        run_n=[run.n for span in spans for run in span.runs],
        run_version=[run.version for span in spans for run in span.runs],
    )
    return message.SerializeToString()


@dataclass(slots=True, kw_only=True)
class Columns:
    """A TokenSpans message that was checked, as the columns that it came in: row i is a span, as in `Span`.

    For whoever takes in many of them: nothing is made for a row. The tokens of all rows lie end to end. Read it only; it is
    not frozen because that costs as much as the check of a column.
    """

    worker: str
    incarnation: int
    number: int
    final: bool
    numerics_key: str
    handles: list[int]
    attempts: list[int]
    offsets: list[int]
    counts: list[int]
    """Tokens of each row."""
    finishes: Sequence[int]
    """Values of Finish."""
    starts: list[int]
    """Place of each row's first token among those of the message."""
    ids: bytes
    """Little-endian u32."""
    logprobs: bytes
    """Little-endian f32."""
    version: int | None
    """The version that sampled all tokens, if it is one."""
    run_counts: list[int]
    run_versions: list[int]
    first_runs: Sequence[int]
    """Place of each row's first version run, and behind the last row the number of runs."""

    def runs(self, row: int) -> Iterator[tuple[int, int]]:
        """Return the (tokens, version) of a row's version runs."""
        own = slice(self.first_runs[row], self.first_runs[row + 1])
        return zip(self.run_counts[own], self.run_versions[own], strict=True)


def names(data: bytes, worker: str) -> bool:
    """Whether a TokenSpans message begins by naming this worker. One that `read` took names no other one later on."""
    name = worker.encode()
    return 0 < len(name) < 128 and data.startswith(bytes([0x0A, len(name)]) + name)


def read(data: bytes) -> Columns:
    """Return the columns of a TokenSpans message.

    Raises:
        CorruptData: it is no such message, or its columns do not fit together; names the column.
    """
    message = spans_pb2.TokenSpans()
    try:
        message.ParseFromString(data)
    except DecodeError as error:
        raise CorruptData(f"not a TokenSpans message: {error}") from error
    rows = len(message.handle)
    lengths = len(message.attempt), len(message.offset), len(message.n), len(message.finish)
    for column, n in zip(_ROWS, lengths, strict=True):
        if n != rows:
            raise CorruptData(f"TokenSpans.{column} has {n} rows, handle has {rows}")
    # Slices: several times as fast as `list`.
    counts, finishes = message.n[:], message.finish[:]
    starts = list(accumulate(counts, initial=0))
    total = starts.pop()
    ids, logprobs = message.ids, message.logprobs
    known, chances = len(as_ids(ids)), as_logprobs(logprobs)
    if known != total or len(chances) != total:
        raise CorruptData(f"TokenSpans.n sums to {total}, but there are {known} ids and {len(chances)} logprobs")
    # Asked this way round, since no comparison holds for NaN.
    if total and not (chances.min() > -np.inf and chances.max() <= MAX_LOGPROB):
        raise CorruptData("TokenSpans.logprobs holds a value that is not finite or above 0")
    if not _FINISHES.issuperset(finishes):
        wrong = next(value for value in finishes if value not in _FINISHES)
        raise CorruptData(f"TokenSpans.finish holds {wrong}, which is not a finish")
    if not all(map(or_, counts, finishes)):
        raise CorruptData("TokenSpans has a row with neither tokens nor a finish")
    run_counts, run_versions = message.run_n[:], message.run_version[:]
    if len(run_counts) != len(run_versions):
        raise CorruptData(f"TokenSpans has {len(run_counts)} run_n and {len(run_versions)} run_version")
    if not names(data, message.worker):
        raise CorruptData(f"TokenSpans names more than one worker, or none: {message.worker[:100]!r}")
    return Columns(
        worker=message.worker,
        incarnation=message.incarnation,
        number=message.flush,
        final=message.final,
        numerics_key=message.numerics_key,
        handles=message.handle[:],
        attempts=message.attempt[:],
        offsets=message.offset[:],
        counts=counts,
        finishes=finishes,
        starts=starts,
        ids=ids,
        logprobs=logprobs,
        version=run_versions[0] if len(set(run_versions)) == 1 else None,
        run_counts=run_counts,
        run_versions=run_versions,
        first_runs=_first_runs(counts, run_counts),
    )


_ROWS = ("attempt", "offset", "n", "finish")
_FINISHES = frozenset(finish.value for finish in Finish)


def _first_runs(counts: list[int], runs: list[int]) -> Sequence[int]:
    """Return the place of each row's first run and the number of runs, given the tokens of each row and of each run."""
    if runs == counts:
        return range(len(runs) + 1)  # the usual case: a run a row
    first = []
    run = 0
    for row, n in enumerate(counts):
        first.append(run)
        while n > 0:
            if run == len(runs) or not 0 < runs[run] <= n:
                raise CorruptData(f"TokenSpans version runs do not cover row {row} of {counts[row]} tokens exactly")
            n -= runs[run]
            run += 1
    if run < len(runs):
        raise CorruptData("TokenSpans has more version runs than tokens")
    return [*first, run]


def unpack(data: bytes) -> Flush:
    """Return the flush of a TokenSpans message.

    Raises:
        CorruptData: it is no such message, or its columns do not fit together; names the column.
    """
    columns = read(data)
    ids, logprobs = as_ids(columns.ids), as_logprobs(columns.logprobs)
    spans = []
    for row, (start, n) in enumerate(zip(columns.starts, columns.counts, strict=True)):
        span = Span(
            handle=columns.handles[row],
            attempt=columns.attempts[row],
            offset=columns.offsets[row],
            ids=ids[start : start + n],
            logprobs=logprobs[start : start + n],
            runs=tuple(Run(tokens, version) for tokens, version in columns.runs(row)),
            finish=Finish(columns.finishes[row]),
        )
        spans.append(span)
    return Flush(
        worker=columns.worker,
        incarnation=columns.incarnation,
        number=columns.number,
        spans=tuple(spans),
        final=columns.final,
        numerics_key=columns.numerics_key,
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
