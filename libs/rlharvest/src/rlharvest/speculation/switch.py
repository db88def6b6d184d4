"""Whether drafts pay, by what steps took: tokens per second with them against without them.

An arm is the longest draft that a step may verify, 0 for none. Batches of about equal size have one arm in use. From time
to time a round compares all arms: they take turns, step by step, so that whatever else the machine does meets all alike,
and an arm leaves as soon as it is clear that it does not pay. Nothing is assumed about the machine or the model: where
verification is bound by computation, the measured rate says so.

Times are noisy and tokens come in bursts. So a time counts as at most OUTLIER medians of its arm, a rate has a standard
error, and drafts come into use only where their rate is above that of none by more than the error.

Invariants: what a round has lost, by its own measurements, is at most COST of the time until the next one, except one that
asks whether drafts in use still pay; a round takes at most STEPS_MOST + 1 steps of each arm; an arm that a round finds
slower than none is not in use after it; while none is in use and there is no round, no step need be timed.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MARGIN = 0.03
"""An arm that is not faster by so much is not worth a round's time, nor a change from another one."""

STEPS_LEAST = 6
"""Steps of each arm before a round judges it."""

STEPS_MOST = 32
"""Steps of an arm in a round, and the newest ones that its rate is taken of."""

FIRST = 32
"""Steps of a new size of batch before its first round."""

ROUND_EVERY = 256
"""Steps between two rounds, at first, after a change, and while drafts seem to pay, but not surely."""

ROUND_EVERY_MOST = 4096
"""The interval doubles up to this while rounds confirm what is in use."""

COST = 0.01
"""Share of the time that rounds may lose."""

OUTLIER = 3.0
"""A step counts as at most so many times as long as its arm's median: the machine did something else as well."""

NOISE = 0.3
"""Least relative deviation that a single step is assumed to have: a few steps that agree by chance prove little."""

SURE = 2.0
"""Standard errors at which a round does not ask any longer."""


@dataclass(slots=True)
class _Arm:
    cap: int
    steps: deque[tuple[float, int]] = field(default_factory=lambda: deque(maxlen=STEPS_MOST))
    """Seconds and tokens."""
    drafted: bool = False
    """In this round something was drafted."""
    fresh: bool = False
    """Its first step of the round is not over. That one is not counted: it brings the index up to date."""

    def begin(self) -> None:
        self.steps.clear()
        self.drafted, self.fresh = False, True

    def take(self, seconds: float, tokens: int, *, drafted: bool) -> None:
        self.drafted = self.drafted or drafted
        if not self.fresh:
            self.steps.append((seconds, tokens))
        self.fresh = False

    def measured(self) -> tuple[float, float, float]:
        """Return mean seconds of a step, tokens per second, and the square of the relative standard error of those."""
        n = len(self.steps)
        if not n:
            return 0.0, 0.0, math.inf
        longest = OUTLIER * statistics.median(seconds for seconds, _ in self.steps)
        steps = [(min(seconds, longest), tokens) for seconds, tokens in self.steps]
        time, tokens = sum(seconds for seconds, _ in steps), sum(count for _, count in steps)
        if not time or not tokens:
            return time / n, 0.0, math.inf
        rate = tokens / time
        # Of a ratio of sums, by its residuals (Cochran, Sampling Techniques, section 2.11).
        spread = sum((count - rate * seconds) ** 2 for seconds, count in steps) / max(n - 1, 1) / (tokens / n) ** 2
        return time / n, rate, max(spread, NOISE**2) / n


class _Class:
    """Batches of about equal size."""

    def __init__(self, caps: Sequence[int], used: int) -> None:
        self.arms = [_Arm(cap) for cap in caps]
        self.used = self.arms[used]
        self.racing: list[_Arm] = []
        """Arms that a round still measures, none at all included; empty: there is no round."""
        self.turn = 0
        self.left = FIRST
        """Steps until the next round is due."""
        self.every = ROUND_EVERY
        self.since = 0
        """Steps since the last round."""

    @property
    def chosen(self) -> _Arm:
        return self.racing[self.turn] if self.racing else self.used

    @property
    def doubtful(self) -> bool:
        """Whether drafts are in use that are now slower than none was in the last round."""
        if not self.used.cap or self.since < STEPS_MOST or self.since % (STEPS_MOST // 2):
            return False
        return self.used.measured()[1] < self.arms[0].measured()[1]

    def begin(self) -> None:
        for arm in self.arms:
            arm.begin()
        self.racing, self.turn = list(self.arms), 0

    def observe(self, seconds: float, tokens: int, *, drafted: bool) -> None:
        if self.racing:
            self.chosen.take(seconds, tokens, drafted=drafted)
            self.turn = (self.turn + 1) % len(self.racing)
            if self.turn == 0 and len(self.arms[0].steps) >= STEPS_LEAST:
                self._judge()
            return
        self.left -= 1
        self.since += 1
        if self.used.cap:
            self.used.take(seconds, tokens, drafted=drafted)
        if self.left <= 0 or self.doubtful:
            self.begin()

    def _judge(self) -> None:
        """Let arms go that are not worth asking; conclude when nothing is open."""
        ratios = {arm.cap: self._against_none(arm) for arm in self.racing[1:] if arm.drafted}
        self.racing = [
            self.arms[0],
            *(
                arm
                for arm in self.racing[1:]
                if arm.cap in ratios and ratios[arm.cap][0] + SURE * ratios[arm.cap][1] >= 1 + MARGIN
            ),
        ]
        undecided = any(ratio - SURE * error <= 1 for ratio, error in (ratios[arm.cap] for arm in self.racing[1:]))
        if not undecided or len(self.arms[0].steps) == STEPS_MOST:
            self._conclude(ratios)

    def _conclude(self, ratios: dict[int, tuple[float, float]]) -> None:
        lost, before, left = self._lost(), self.used, self.racing[1:]
        paying = {
            arm.cap: ratios[arm.cap][0]
            for arm in left
            if ratios[arm.cap][0] > 1 + (0 if arm is before else ratios[arm.cap][1])
        }
        informed = any(arm.drafted for arm in self.arms)
        self.racing = []
        if paying:
            best = max(paying, key=lambda cap: paying[cap])
            if paying[best] > paying.get(before.cap, 0.0) * (1 + MARGIN):
                self.used = next(arm for arm in self.arms if arm.cap == best)
        elif informed:
            self.used = self.arms[0]
        promising = not paying and any(ratios[arm.cap][0] > 1 + MARGIN for arm in left)
        settled = informed and self.used is before and not promising
        self.every = min(2 * self.every, ROUND_EVERY_MOST) if settled else ROUND_EVERY
        self.left, self.since = max(self.every, math.ceil(lost / COST)), 0

    def _against_none(self, arm: _Arm) -> tuple[float, float]:
        """Return how many times as fast as none an arm is, and the standard error of that."""
        _, none, none_error = self.arms[0].measured()
        _, rate, error = arm.measured()
        if not none or not rate:
            return 0.0, math.inf
        return rate / none, rate / none * math.sqrt(error + none_error)

    def _lost(self) -> float:
        """Return what this round took beyond what the arm in use takes for its tokens, in steps of that arm."""
        step, rate, _ = self.used.measured()
        if not step or not rate:
            return 0.0
        lost = 0.0
        for arm in self.arms:
            mean, own, _ = arm.measured()
            lost += (len(arm.steps) + 1) * mean / step * max(0.0, 1 - own / rate)
        return lost


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
        return self._class(batch).chosen.cap

    def measuring(self, batch: int) -> bool:
        """Return whether it matters how long that step takes."""
        found = self._class(batch)
        return bool(found.racing or found.used.cap)

    def observe(self, batch: int, *, seconds: float, tokens: int, drafted: bool) -> None:
        """Take in what the step took that `choose` was asked about last for such a batch.

        Args:
            seconds: of the step, looking up included; anything where `measuring` is False.
            tokens: that came out of it.
            drafted: whether it verified any draft; if an arm never does, a round says nothing about it.
        """
        self._class(batch).observe(seconds, tokens, drafted=drafted)

    def rates(self, batch: int) -> dict[int, float]:
        """Return the measured tokens per second of each arm, 0 where nothing is measured."""
        return {arm.cap: arm.measured()[1] for arm in self._class(batch).arms}

    def _class(self, batch: int) -> _Class:
        key = (batch - 1).bit_length()
        found = self._classes.get(key)
        if found is None:
            # What pays in a larger batch does so in a smaller one: it computes less for each weight that it reads.
            larger = min((other for other in self._classes if other > key), default=None)
            used = 0 if larger is None else self._caps.index(self._classes[larger].used.cap)
            found = self._classes[key] = _Class(self._caps, used)
        return found
