"""Tokens that the ledger does not have for sure yet: a pure state machine between the engine and the bus.

Every token of a response passes through three marks, which only rise except where the ledger asks for a repetition:

    base <= sent, published <= end      base: the ledger has what is below (LedgerAck), so its copy is freed
                                        sent: was put into a flush
                                        published: that flush is durable (PubAck)

Invariants: tokens base .. end of each response are kept; `take` gives every token at least once, in order; a
repetition only ever starts at a length that the ledger named or at base; a finished response is held until its finish
is durable and a LedgerAck covers its whole length. So any loss of acknowledgements or of unacknowledged messages
costs bandwidth, never a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
from rlharvest.engine import EngineBroken
from rlharvest.spans import Finish, Run, Span, merge_runs, skip_runs
from rlharvest.v1 import spans_pb2

# Most bytes that a row, a version run and a token take in a TokenSpans message.
_ROW_BYTES = 48
_RUN_BYTES = 12
_TOKEN_BYTES = 8


class AckOutcome(Enum):
    """What the worker has to do after an acknowledgement."""

    NOTHING = "nothing"
    RESEND = "resend"
    """Tokens are due again: flush soon."""
    FENCED = "fenced"
    """Another attempt owns the response: abort it in the engine."""
    LOST = "lost"
    """The ledger asks for tokens that it had acknowledged and that are freed: abort, the coordinator assigns anew."""


@dataclass(frozen=True, slots=True)
class Held:
    """A response as a heartbeat reports it."""

    handle: int
    attempt: int
    length: int


@dataclass(slots=True)
class _Entry:
    attempt: int
    base: int
    sent: int
    published: int
    acked: int | None = None
    """Length of the last LedgerAck; None: there was none."""
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    runs: list[Run] = field(default_factory=list)
    finish: Finish = Finish.NONE
    finish_sent: bool = False
    finish_published: bool = False
    closing: bool = False
    """Nothing is generated any more; it goes as soon as its tokens are durable."""
    overdue_at: tuple[int, int | None, bool] | None = None
    """(published, acked, finish) when `probe` looked last and an acknowledgement was missing."""

    @property
    def end(self) -> int:
        return self.base + len(self.ids)

    @property
    def unsent(self) -> bool:
        return self.sent < self.end or (self.finish is not Finish.NONE and not self.finish_sent)

    @property
    def done(self) -> bool:
        if self.closing:
            return self.published >= self.end and (self.finish is Finish.NONE or self.finish_published)
        return (
            self.finish is not Finish.NONE
            and self.finish_published
            and self.acked is not None
            and self.acked >= self.end
        )

    def cut(self, handle: int, start: int, n: int) -> Span:
        skip = start - self.base
        return Span(
            handle=handle,
            attempt=self.attempt,
            offset=start,
            ids=np.asarray(self.ids[skip : skip + n], dtype=np.uint32),
            logprobs=np.asarray(self.logprobs[skip : skip + n], dtype=np.float32),
            runs=_first_runs(skip_runs(self.runs, skip), n),
            finish=self.finish if start + n == self.end else Finish.NONE,
        )


class Buffer:
    """The tokens of all responses of one worker in one job."""

    def __init__(self, limit_tokens: int) -> None:
        self.limit_tokens = limit_tokens
        self.tokens = 0
        """Tokens kept, over all responses."""
        self.unsent_tokens = 0
        """Of these, tokens that no flush has taken."""
        self._entries: dict[int, _Entry] = {}

    @property
    def full(self) -> bool:
        """Whether generation has to wait for the ledger."""
        return self.tokens >= self.limit_tokens

    @property
    def unsent(self) -> bool:
        """Whether a flush would carry anything."""
        return any(entry.unsent for entry in self._entries.values())

    @property
    def running(self) -> int:
        """Responses that still generate."""
        return sum(entry.finish is Finish.NONE and not entry.closing for entry in self._entries.values())

    def held(self) -> list[Held]:
        """Return all responses that are not handed over for good."""
        return [Held(handle, entry.attempt, entry.end) for handle, entry in self._entries.items()]

    def attempt(self, handle: int) -> int | None:
        """Return the attempt under which a response is held, or None."""
        entry = self._entries.get(handle)
        return None if entry is None else entry.attempt

    def open(self, handle: int, attempt: int, length: int) -> None:
        """Hold a response that has `length` tokens in the ledger; replaces an older attempt."""
        self.forget(handle)
        self._entries[handle] = _Entry(attempt, base=length, sent=length, published=length)

    def add(self, span: Span) -> int:
        """Take new tokens; return how many. Those of a response or attempt that is not held are not wanted any more: 0.

        Raises:
            EngineBroken: the span does not continue the response.
        """
        entry = self._entries.get(span.handle)
        if entry is None or entry.attempt != span.attempt or entry.closing:
            return 0
        if span.offset != entry.end or entry.finish is not Finish.NONE:
            raise EngineBroken(
                f"the engine gave tokens from {span.offset} on for response {span.handle}, which has {entry.end}"
                + (" and is finished" if entry.finish is not Finish.NONE else "")
            )
        entry.ids.extend(span.ids.tolist())
        entry.logprobs.extend(span.logprobs.tolist())
        entry.runs = list(merge_runs([*entry.runs, *span.runs]))
        entry.finish = span.finish
        self.tokens += len(span.ids)
        self.unsent_tokens += len(span.ids)
        return len(span.ids)

    def take(self, max_bytes: int) -> list[Span]:
        """Return what no flush has taken yet, at most `max_bytes` as a message; the rest comes with the next call."""
        spans = []
        room = max_bytes
        for handle, entry in self._entries.items():
            if not entry.unsent:
                continue
            n = entry.end - entry.sent
            runs = len(skip_runs(entry.runs, entry.sent - entry.base))
            most = max(
                (room - _ROW_BYTES - runs * _RUN_BYTES) // _TOKEN_BYTES,
                (room - _ROW_BYTES) // (_TOKEN_BYTES + _RUN_BYTES),
            )
            n = min(n, most)
            if room < _ROW_BYTES or (n <= 0 and entry.sent < entry.end):
                break
            span = entry.cut(handle, entry.sent, n)
            spans.append(span)
            entry.sent += n
            entry.finish_sent = entry.finish_sent or span.finish is not Finish.NONE
            self.unsent_tokens -= n
            room -= _ROW_BYTES + n * _TOKEN_BYTES + len(span.runs) * _RUN_BYTES
        return spans

    def confirm(self, spans: Sequence[Span]) -> None:
        """A flush with these spans got its PubAck."""
        for span in spans:
            entry = self._entries.get(span.handle)
            if entry is None or entry.attempt != span.attempt:
                continue
            entry.published = max(entry.published, span.end)
            entry.finish_published = entry.finish_published or span.finish is not Finish.NONE
            self._release(span.handle, entry)

    def acknowledge(self, handle: int, attempt: int, length: int, status: int) -> AckOutcome:
        """Apply one row of a LedgerAck."""
        entry = self._entries.get(handle)
        if entry is None or entry.attempt != attempt:
            return AckOutcome.NOTHING
        if status == spans_pb2.ACK_STATUS_FENCED:
            self.forget(handle)
            return AckOutcome.FENCED
        if status == spans_pb2.ACK_STATUS_GAP and length < entry.base:
            self.forget(handle)
            return AckOutcome.LOST
        entry.acked = max(entry.acked or 0, length)
        self._free(entry, length)
        if status != spans_pb2.ACK_STATUS_GAP:
            self._release(handle, entry)
            return AckOutcome.NOTHING
        self._rewind(entry, length)
        return AckOutcome.RESEND

    def resend(self) -> int:
        """Make every token that no LedgerAck covers due again; return how many."""
        for entry in self._entries.values():
            self._rewind(entry, entry.base)
        return self.tokens

    def probe(self) -> list[Span]:
        """Return the last durable token of each response whose acknowledgement is missing since the last call.

        The ledger trims it and answers with its length: so a lost LedgerAck is made up for, at the cost of a token.
        """
        spans = []
        for handle, entry in self._entries.items():
            waits = entry.published > (entry.acked or entry.base) or entry.finish_published
            seen = (entry.published, entry.acked, entry.finish_published) if waits else None
            if waits and seen == entry.overdue_at:
                start = max(entry.base, entry.published - 1)
                n = entry.published - start
                if n or entry.finish_published:
                    spans.append(entry.cut(handle, start, n))
            entry.overdue_at = seen
        return spans

    def close(self, handle: int, attempt: int) -> None:
        """Generate no more of a response, but publish what there is before it is let go."""
        entry = self._entries.get(handle)
        if entry is not None and entry.attempt == attempt:
            entry.closing = True
            self._release(handle, entry)

    def forget(self, handle: int, attempt: int | None = None) -> bool:
        """Drop a response with its tokens (only that attempt of it, if one is given); return whether it was held."""
        entry = self._entries.get(handle)
        if entry is None or (attempt is not None and entry.attempt != attempt):
            return False
        del self._entries[handle]
        self.tokens -= len(entry.ids)
        self.unsent_tokens -= entry.end - entry.sent
        return True

    def clear(self) -> None:
        """Drop everything."""
        self._entries.clear()
        self.tokens = self.unsent_tokens = 0

    def _free(self, entry: _Entry, length: int) -> None:
        freed = min(length, entry.end) - entry.base
        if freed <= 0:
            return
        del entry.ids[:freed]
        del entry.logprobs[:freed]
        entry.runs = list(skip_runs(entry.runs, freed))
        entry.base += freed
        entry.published = max(entry.published, entry.base)
        self.tokens -= freed
        if entry.sent < entry.base:
            self.unsent_tokens -= entry.base - entry.sent
            entry.sent = entry.base

    def _rewind(self, entry: _Entry, length: int) -> None:
        length = max(entry.base, min(length, entry.sent))
        self.unsent_tokens += entry.sent - length
        entry.sent = length
        entry.finish_sent = entry.finish_published = False

    def _release(self, handle: int, entry: _Entry) -> None:
        if entry.done:
            self.forget(handle)


def _first_runs(runs: Sequence[Run], n: int) -> tuple[Run, ...]:
    """Return the runs of the first `n` tokens."""
    kept = []
    for run in runs:
        if n <= 0:
            break
        kept.append(Run(min(n, run.n), run.version))
        n -= run.n
    return tuple(kept)
