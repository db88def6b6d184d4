"""New tokens on their way from the engine's thread to the event loop.

Invariants, all under one lock: only tokens of the attempt that is wanted get in, so nothing of an aborted or replaced
attempt comes out after `forget` or `want` returned; a response's tokens come out in order; its finish ends the
wanting of it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from rlharvest.engine import EngineBroken
from rlharvest.spans import Finish, Run, Span, merge_runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """A new token of a response, or only its finish."""

    handle: int
    attempt: int
    offset: int
    id: int | None
    logprob: float = 0.0
    finish: Finish = Finish.NONE


@dataclass(slots=True)
class _Pending:
    attempt: int
    offset: int
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    finish: Finish = Finish.NONE


class Outbox:
    """Tokens that nobody has taken yet."""

    def __init__(self, wake: Callable[[], None]) -> None:
        """Call `wake`, from whatever thread, when there is something to take."""
        self._wake = wake
        self._lock = threading.Lock()
        self._wanted: dict[int, int] = {}
        self._pending: dict[int, _Pending] = {}
        self._failure: EngineBroken | None = None

    def want(self, handle: int, attempt: int) -> bool:
        """Accept tokens of this attempt from now on, and of no older one; False if it or a newer one is here already."""
        with self._lock:
            pending = self._pending.get(handle)
            if max(self._wanted.get(handle, -1), -1 if pending is None else pending.attempt) >= attempt:
                return False
            self._wanted[handle] = attempt
            self._pending.pop(handle, None)
            return True

    def forget(self, keys: Iterable[tuple[int, int]]) -> None:
        """Drop the tokens of these (handle, attempt) pairs and accept no more."""
        with self._lock:
            for handle, attempt in keys:
                if self._wanted.get(handle) == attempt:
                    del self._wanted[handle]
                pending = self._pending.get(handle)
                if pending is not None and pending.attempt == attempt:
                    del self._pending[handle]

    def forget_all(self) -> None:
        """Drop everything and accept nothing."""
        with self._lock:
            self._wanted.clear()
            self._pending.clear()

    def put(self, tokens: Sequence[Token], version: int) -> None:
        """Add tokens that a version sampled."""
        with self._lock:
            for token in tokens:
                if self._wanted.get(token.handle) != token.attempt:
                    continue
                pending = self._pending.get(token.handle)
                if pending is None:
                    pending = self._pending[token.handle] = _Pending(token.attempt, token.offset)
                if token.id is not None:
                    pending.ids.append(token.id)
                    pending.logprobs.append(token.logprob)
                    pending.versions.append(version)
                if token.finish is not Finish.NONE:
                    pending.finish = token.finish
                    del self._wanted[token.handle]
            ready = bool(self._pending)
        if ready:
            self._wake()

    def fail(self, error: EngineBroken) -> None:
        """Let `take` raise this once all tokens are taken."""
        with self._lock:
            self._failure = self._failure or error
        self._wake()

    @property
    def failure(self) -> EngineBroken | None:
        """What broke the engine, if anything did."""
        return self._failure

    def take(self) -> list[Span]:
        """Return all tokens as spans, one a response; raise EngineBroken if there are none and never will be."""
        with self._lock:
            pending, self._pending = self._pending, {}
            failure = self._failure
        if not pending and failure is not None:
            raise failure
        return [_span(handle, tokens) for handle, tokens in pending.items()]


def _span(handle: int, pending: _Pending) -> Span:
    return Span(
        handle=handle,
        attempt=pending.attempt,
        offset=pending.offset,
        ids=np.array(pending.ids, dtype=np.uint32),
        logprobs=np.array(pending.logprobs, dtype=np.float32),
        runs=merge_runs([Run(1, version) for version in pending.versions]),
        finish=pending.finish,
    )
