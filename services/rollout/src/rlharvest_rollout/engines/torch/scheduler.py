"""Which sequences run: a queue, the running ones without a hole, and at most one on its way between.

Pure state, no tensors, no clock. Invariants: a handle is here at most once, with its newest attempt; running sequence
i has slot i; there are never more than `slots` running; waiting ones enter in order, and those that a version switch
sends back go before all others, in the order they ran in.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
from rlharvest.engine import Request
from rlharvest.noise import uniforms
from rlharvest.speculation.index import PromptIndex
from rlharvest.speculation.window import WINDOW_START

UNIFORMS = 64
"""Uniforms are made so many at a time: making a generator costs as much as drawing a hundred."""


@dataclass(slots=True)
class Own:
    """Where a sequence stands in the index of its prompt."""

    prompt: bytes
    """Key of the prompt."""
    index: PromptIndex
    serial: int
    """Of its own tokens there."""
    known: int
    """So many of them are there."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A response that is generated here."""

    request: Request
    prompt: list[int]
    ids: list[int]
    """Tokens of the response, prefix included."""
    window: int = WINDOW_START
    """Tokens to draft next."""
    own: Own | None = None
    """What drafts come from; None: nothing was drafted yet."""
    _uniforms: list[float] = field(default_factory=list)
    _drawn: int = 0

    @classmethod
    def of(cls, request: Request) -> Sequence:
        """Return the sequence of a request."""
        ids = np.asarray(request.prefix).tolist()
        return cls(request=request, prompt=np.asarray(request.prompt).tolist(), ids=ids, _drawn=len(ids))

    @property
    def key(self) -> tuple[int, int]:
        """(handle, attempt)."""
        return self.request.handle, self.request.attempt

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.ids)

    def token(self, position: int) -> int:
        """Return the token at a position of prompt and response together."""
        before = len(self.prompt)
        return self.prompt[position] if position < before else self.ids[position - before]

    def tail(self, n: int) -> list[int]:
        """Return the last n tokens of prompt and response together, or all if they are fewer."""
        ids = self.ids
        return ids[-n:] if len(ids) >= n else self.prompt[len(ids) - n :] + ids

    def noise(self, n: int) -> list[float]:
        """Return the uniforms of the next n tokens: those of their positions in the response."""
        at = len(self.ids) - self._drawn
        if at + n > len(self._uniforms):
            self._drawn, at = len(self.ids), 0
            self._uniforms = uniforms(self.request.seed, self._drawn, max(n, UNIFORMS)).tolist()
        return self._uniforms[at : at + n]


@dataclass(frozen=True, slots=True)
class Move:
    """The sequence of slot `source` now has slot `target`; `length` tokens of it are cached at most."""

    source: int
    target: int
    length: int


class Scheduler:
    """Sequences of one engine."""

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self.waiting: deque[Sequence] = deque()
        self.entering: Sequence | None = None
        self.running: list[Sequence] = []

    def __iter__(self) -> Iterator[Sequence]:
        yield from self.running
        if self.entering is not None:
            yield self.entering
        yield from self.waiting

    @property
    def busy(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.running or self.waiting or self.entering is not None)

    def submit(self, sequence: Sequence) -> list[Move]:
        """Queue a sequence; an older attempt at its handle goes."""
        handle, attempt = sequence.key
        found = next((other for other in self if other.key[0] == handle), None)
        if found is not None and found.key[1] >= attempt:
            return []
        moves = self.abort({found.key}) if found is not None else []
        self.waiting.append(sequence)
        return moves

    def admit(self) -> Sequence | None:
        """Let the next sequence enter, if a slot is free and none is entering."""
        if self.entering is None and self.waiting and len(self.running) < self.slots:
            self.entering = self.waiting.popleft()
            return self.entering
        return None

    def join(self) -> int:
        """Make the entering sequence a running one; return its slot."""
        assert self.entering is not None
        self.running.append(self.entering)
        self.entering = None
        return len(self.running) - 1

    def finish(self, done: Callable[[Sequence], bool]) -> list[Move]:
        """Take running sequences out; return the moves, to be made in order, that close the holes."""
        moves = []
        for slot in reversed(range(len(self.running))):
            if done(self.running[slot]):
                last = self.running.pop()
                if slot < len(self.running):
                    self.running[slot] = last
                    moves.append(Move(len(self.running), slot, last.length))
        return moves

    def abort(self, keys: set[tuple[int, int]]) -> list[Move]:
        """Forget sequences wherever they are; return moves as `finish` does."""
        self.waiting = deque(sequence for sequence in self.waiting if sequence.key not in keys)
        if self.entering is not None and self.entering.key in keys:
            self.entering = None
        return self.finish(lambda sequence: sequence.key in keys)

    def requeue(self) -> None:
        """Send every sequence back to the head of the queue: its keys and values are void."""
        back = list(self.running) + ([self.entering] if self.entering is not None else [])
        self.waiting.extendleft(reversed(back))
        self.running, self.entering = [], None
