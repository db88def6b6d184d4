"""How fast tokens come, measured the same way inside the system and without it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Pace:
    """Tokens as they come, with the time at which each lot of them did.

    The first lot only starts the clock: how long it had been in the making is not known.
    """

    tokens: int = 0
    first: int = 0
    """Tokens of the first lot."""
    start: float | None = None
    end: float = 0.0

    def add(self, at: float, tokens: int) -> None:
        """Take in tokens that came at a time, in seconds."""
        if not tokens:
            return
        if self.start is None:
            self.start, self.first = at, tokens
        self.tokens += tokens
        self.end = at

    @property
    def per_s(self) -> float:
        """Tokens a second."""
        if self.start is None or self.end <= self.start:
            return float("nan")
        return (self.tokens - self.first) / (self.end - self.start)
