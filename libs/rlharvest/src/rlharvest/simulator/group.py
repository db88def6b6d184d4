"""The responses to one prompt, and what was counted over all of them."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class Group:
    """The responses to one prompt while any of them is live."""

    ordinal: int
    left: int
    tokens: int = 0
    """Of prompts and finished responses."""
    homes: set[str] = field(default_factory=set)
    """Workers that prefilled its prompt."""


@dataclass(slots=True)
class Counts:
    """What happened so far."""

    generated: int = 0
    """Tokens of finished responses."""
    regenerated: int = 0
    """Tokens that were generated, lost and generated again."""
    moves: int = 0
    """Responses that were moved by decision."""
    orphans: int = 0
    """Responses whose owner died."""
    rounds: int = 0
    finished: int = 0
    """Responses."""
