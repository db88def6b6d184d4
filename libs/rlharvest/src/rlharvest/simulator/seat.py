"""A worker as the coordinator sees it: an engine, what it serves, what is on its way to it."""

from __future__ import annotations

from dataclasses import dataclass, field

from rlharvest.simulator.clock import Timer
from rlharvest.simulator.engine import Engine, Response


@dataclass(slots=True, eq=False)
class Seat:
    """One incarnation of a worker."""

    engine: Engine
    timer: Timer
    """When something in its engine happens next."""
    reserved: bool
    """It shares the trainer's device."""
    version: int | None = None
    """What it serves; versions and optimizer steps are the same here."""
    ready: bool = False
    """It takes work."""
    gone: bool = False
    incoming: dict[int, Response] = field(default_factory=dict)
    """On their way from another worker, by handle."""
    steps: float = 0.0
    tokens: float = 0.0
    decoding_s: float = 0.0
    """Of its engine, when it was looked at last."""

    @property
    def name(self) -> str:
        """Its identity."""
        return self.engine.name

    @property
    def held(self) -> int:
        """Responses that it owns."""
        return self.engine.held + len(self.incoming)
