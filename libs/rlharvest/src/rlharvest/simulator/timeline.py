"""Who was in which state when, for charts and for looking at a run."""

from __future__ import annotations

from typing import Literal, NamedTuple

State = Literal["boot", "load", "idle", "rollout", "train", "wait", "switch"]


class Stretch(NamedTuple):
    """A time in one state, seconds of the run."""

    who: str
    state: State
    start_s: float
    end_s: float


class Timeline:
    """The stretches of all workers. Invariant: those of one worker follow one another without overlap."""

    def __init__(self, *, most: int = 200_000) -> None:
        self.stretches: list[Stretch] = []
        self.left_out = 0
        """Stretches beyond the most that are kept."""
        self._most = most
        self._now: dict[str, tuple[State, float]] = {}

    def enter(self, who: str, state: State, at_s: float) -> None:
        """A worker enters a state; the one it is in already changes nothing."""
        before = self._now.get(who)
        if before is not None:
            if before[0] == state:
                return
            self._put(who, before, at_s)
        self._now[who] = (state, at_s)

    def leave(self, who: str, at_s: float) -> None:
        """A worker is gone."""
        before = self._now.pop(who, None)
        if before is not None:
            self._put(who, before, at_s)

    def close(self, at_s: float) -> None:
        """The run is over."""
        for who in list(self._now):
            self.leave(who, at_s)

    def _put(self, who: str, before: tuple[State, float], at_s: float) -> None:
        if at_s <= before[1]:
            return
        if len(self.stretches) < self._most:
            self.stretches.append(Stretch(who, before[0], before[1], at_s))
        else:
            self.left_out += 1
