"""One choice of a completion: what its client is given of a response, step by step. Pure.

Invariants: tokens end where the first stop string is complete, however they came; the reason comes with the last of them,
once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from rlharvest.spans import Finish, Run

from rlharvest_coordinator.gateway.text import Decode, Detokeniser, Stops
from rlharvest_coordinator.serving import Delta

Reason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What is new of a choice."""

    index: int
    text: str
    """May lag behind the tokens: part of a character, or of what may become a stop string, is held back."""
    ids: list[int]
    logprobs: list[float]
    """Of the tokens, under the distribution that they were drawn from."""
    reason: Reason | None
    """Why it ended; None: it goes on."""
    runs: tuple[Run, ...] = ()
    """Versions that sampled its tokens, from the first on, where it ended."""


@dataclass(slots=True)
class Choice:
    """One response on its way to a client."""

    index: int
    decode: Decode
    stop: Sequence[str]
    tokens: int = 0
    """Given so far."""
    reason: Reason | None = None
    _text: Detokeniser = field(init=False)
    _stops: Stops = field(init=False)

    def __post_init__(self) -> None:
        self._text, self._stops = Detokeniser(self.decode), Stops(self.stop)

    def add(self, delta: Delta) -> Piece | None:
        """Take what is new of the response; None if nothing of it is for the client."""
        if self.reason is not None:
            return None
        text, taken = "", 0
        for token in delta.ids:
            taken += 1
            text += self._stops.add(self._text.add([token]))
            if self._stops.found:
                break
        if self._stops.found:
            self.reason = "stop"
        elif delta.finish is not Finish.NONE:
            text += self._stops.add(self._text.end()) + self._stops.end()
            self.reason = "length" if delta.finish is Finish.LENGTH else "stop"
        self.tokens += taken
        return Piece(
            index=self.index,
            text=text,
            ids=delta.ids[:taken],
            logprobs=delta.logprobs[:taken],
            reason=self.reason,
            runs=_first(delta.runs, self.tokens) if self.reason is not None else (),
        )


def _first(runs: Sequence[Run], tokens: int) -> tuple[Run, ...]:
    """Return the runs of the first `tokens` tokens."""
    kept = []
    for run in runs:
        if tokens <= 0:
            break
        kept.append(Run(min(run.n, tokens), run.version))
        tokens -= run.n
    return tuple(kept)
