"""Whether drafts pay, by what steps took: tokens per second with them against without them.

A bandit of few arms. An arm is the longest draft that a step may verify, 0 for none. For batches of about equal size, the
arm with the most measured tokens per second is used. Every so many steps a round of trials measures the other arms for a
few steps each, ever more seldom while that changes nothing. Nothing is assumed about the machine or the model: where
verification is bound by computation, the measured rate says so.

Invariants: outside of trials, drafts are used only while their measured rate is above that of drafting nothing; when they
come into use it is higher by MARGIN; at most one round of trials in TRIAL_EVERY steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN = 0.03
"""By so much must another arm be faster."""

TRIAL_STEPS = 4
"""Steps of a trial."""

TRIAL_EVERY = 256
"""Steps between two rounds of trials, at first and after a change."""

TRIAL_EVERY_MOST = 4096
"""The interval doubles up to this while trials change nothing."""

DECAY = 0.96
"""Weight of the measurements before, a step: about the last 25 count."""

OUTLIER = 3.0
"""A step counts as at most so many times as long as its arm's mean: the machine did something else as well."""


@dataclass(slots=True)
class _Arm:
    cap: int
    weight: float = 0.0
    """Steps measured, the older ones for less."""
    seconds: float = 0.0
    tokens: float = 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds if self.seconds else 0.0

    def observe(self, seconds: float, tokens: int) -> None:
        if self.weight >= 1:
            seconds = min(seconds, OUTLIER * self.seconds / self.weight)
        self.weight = self.weight * DECAY + 1
        self.seconds = self.seconds * DECAY + seconds
        self.tokens = self.tokens * DECAY + tokens

    def fade(self) -> None:
        """Let measurements of long ago count as much as one new step, together."""
        if self.weight > 1:
            self.seconds, self.tokens, self.weight = self.seconds / self.weight, self.tokens / self.weight, 1.0


class _Class:
    """Batches of about equal size."""

    def __init__(self, caps: Sequence[int]) -> None:
        self.arms = [_Arm(cap) for cap in caps]
        self.used = self.arms[0]
        self.trials: list[_Arm] = []
        """Of this round, the present one last."""
        self.left = TRIAL_STEPS
        """Steps that are left of a trial, or until the next round."""
        self.every = TRIAL_EVERY
        self.informed = False
        """A trial of this round drafted something."""

    def choose(self) -> _Arm:
        if self.left <= 0 and not self.trials:
            self.trials = [arm for arm in reversed(self.arms) if arm is not self.used]
            self.informed, self.left = False, TRIAL_STEPS
            self.trials[-1].fade()
        return self.trials[-1] if self.trials else self.used

    def observe(self, arm: _Arm, seconds: float, tokens: int, *, drafted: bool) -> None:
        if drafted or not arm.cap:
            arm.observe(seconds, tokens)
        self.informed = self.informed or drafted
        self.left -= 1
        if not self.trials:
            if self.used.rate <= self.arms[0].rate and self.used.cap:
                self._use(self.arms[0])
        elif self.left <= 0:
            self.trials.pop()
            if self.trials:
                self.left = TRIAL_STEPS
                self.trials[-1].fade()
            else:
                self._conclude()

    def _conclude(self) -> None:
        best = max(self.arms, key=lambda arm: arm.rate)
        if best.rate > self.used.rate * (1 + MARGIN):
            self._use(best)
            return
        if self.informed:
            self.every = min(2 * self.every, TRIAL_EVERY_MOST)
        self.left = self.every

    def _use(self, arm: _Arm) -> None:
        self.used = arm
        self.every = self.left = TRIAL_EVERY


class Switch:
    """Chooses the longest draft of each step."""

    def __init__(self, caps: Sequence[int]) -> None:
        """Set up with the arms.

        Args:
            caps: longest drafts to choose from, ascending; the first is 0.
        """
        if len(caps) < 2 or caps[0] != 0 or list(caps) != sorted(set(caps)):
            raise ValueError(f"caps must ascend from 0: {list(caps)}")
        self._caps = tuple(caps)
        self._classes: dict[int, _Class] = {}

    def choose(self, batch: int) -> int:
        """Return the longest draft that the next step of so many sequences may verify; 0: draft nothing."""
        return self._class(batch).choose().cap

    def observe(self, batch: int, *, seconds: float, tokens: int, drafted: bool) -> None:
        """Take in what the step took that `choose` was asked about last for such a batch.

        Args:
            seconds: of the step, looking up included.
            tokens: that came out of it.
            drafted: whether it verified any draft; if not, it says nothing about drafts.
        """
        found = self._class(batch)
        found.observe(found.choose(), seconds, tokens, drafted=drafted)

    def rates(self, batch: int) -> dict[int, float]:
        """Return the measured tokens per second of each arm, 0 where nothing is measured."""
        return {arm.cap: arm.rate for arm in self._class(batch).arms}

    def _class(self, batch: int) -> _Class:
        key = (batch - 1).bit_length()
        found = self._classes.get(key)
        if found is None:
            found = self._classes[key] = _Class(self._caps)
        return found
