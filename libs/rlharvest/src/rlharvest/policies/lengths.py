"""How long a response will be: the history of its prompt, corrected for drift, with quantiles that are kept honest.

The same prompt gives responses of about the same length again (RhymeRL, arXiv 2508.18588, section 3; RLHFless, arXiv
2602.22718: the last epoch's length is the best single guess), while all responses grow together as the policy learns. So the
logarithm of a length is the level of all responses at the time, plus what its prompt adds, plus what is chance:

- the level follows the residuals of whole batches (Kalman's filter of a random walk); known prompts tell it more than new;
- what a prompt adds is an exponentially weighted mean of its own residuals, drawn towards that of all prompts as far as few
  are known;
- quantiles of the normal distribution are corrected by where earlier lengths fell in their predictions.

A new prompt has the distribution of all prompts. Lengths at the limit are known to be at least that.

Whole batches must be given, not responses as they finish: the short ones finish first.

Invariants (property-tested): predictions are within 1 and the limit, quantiles rise with their share, and what is left of a
longer response is never predicted from less than it has; when all lengths grow by a factor, predictions follow; coverage is
that of predictions made before the length was known; the history holds at most `most` prompts, the longest unseen go first.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

SHARES = (0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)
"""Quantiles whose coverage is reported."""

MEMORY = 16
"""Responses of a prompt after which its mean forgets: an epoch or two of a group."""

MEDIAN = 6.0
SPREAD = 0.99
"""Before there is any history: the limit is so many medians, and the logarithm of lengths has this deviation (the 99th
percentile is ten medians; Laminar, arXiv 2510.12633)."""

WITHIN = 0.5
"""Deviation of the logarithm among responses to one prompt, at first."""

WALK = 1e-3
"""Deviation of the level's step, for each response."""

BINS = 32
FADE = 0.98
"""What a batch leaves of the weight of those before it, in what spreads and corrections are made of."""

TRUST = 64.0
"""Responses that count for the normal distribution before the first correction."""

_NORMAL = NormalDist()


@dataclass(frozen=True, slots=True)
class Prediction:
    """The distribution of one length, in tokens."""

    log_mean: float
    deviation: float
    limit: int
    corrected: tuple[float, ...]
    """Share of earlier lengths in each of BINS equal parts of their predicted distribution, cumulated; begins with 0."""
    known: bool
    """Its prompt has a history."""

    @property
    def mean(self) -> float:
        """The expected length: of the distribution cut at the limit, without corrections."""
        z = (math.log(self.limit) - self.log_mean) / self.deviation
        whole = math.exp(self.log_mean + self.deviation**2 / 2)
        cut = whole * _NORMAL.cdf(z - self.deviation) + self.limit * (1 - _NORMAL.cdf(z))
        return min(float(self.limit), max(1.0, cut))

    def share(self, length: float) -> float:
        """Return how probable it is to be at most that long."""
        if length >= self.limit:
            return 1.0
        return _at(self.corrected, self.rank(length))

    def quantile(self, share: float) -> float:
        """Return the length that so large a share of responses does not exceed."""
        rank = min(max(_inverse(self.corrected, share), 1e-9), 1 - 1e-9)
        log = self.log_mean + self.deviation * _NORMAL.inv_cdf(rank)
        return min(float(self.limit), max(1.0, math.exp(min(log, 60.0))))

    def beyond(self, generated: float, share: float = 0.5) -> float:
        """Return the quantile of the length of a response that has so many tokens and goes on."""
        done = self.share(generated)
        return min(float(self.limit), max(generated, self.quantile(done + share * (1 - done))))

    def rank(self, length: float) -> float:
        """Return the share of shorter lengths by the normal distribution, without corrections."""
        return _NORMAL.cdf((math.log(max(1.0, length)) - self.log_mean) / self.deviation)


@dataclass(slots=True)
class _Prompt:
    mean: float
    """Of the logarithm of its lengths above the level of their time."""
    seen: int
    """Responses, MEMORY at most."""


@dataclass(slots=True)
class Coverage:
    """How often lengths were within a predicted quantile."""

    within: float = 0.0
    of: float = 0.0

    @property
    def share(self) -> float | None:
        """None before the first prediction."""
        return self.within / self.of if self.of else None


class Lengths:
    """The history of one job."""

    def __init__(self, limit: int, *, most: int = 1_000_000) -> None:
        """Set up without history.

        Args:
            limit: tokens that a response has at most. most: prompts that are remembered.
        """
        self.limit = limit
        self.coverage: dict[float, Coverage] = {share: Coverage() for share in SHARES}
        """Of recent predictions below the limit: older batches fade."""
        self._most = most
        self._prompts: OrderedDict[bytes, _Prompt] = OrderedDict()
        self._level = 0.0
        self._doubt = 1e-2
        self._centre = _Mean(math.log(max(1.0, limit / MEDIAN)), 8.0)
        self._within = _Mean(WITHIN**2, TRUST)
        self._total = _Mean(SPREAD**2, TRUST)
        self._bins = [TRUST / BINS] * BINS
        self._corrected = _cumulated(self._bins)

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def growth(self) -> float:
        """How many times as long as at first responses are by now, the same prompts compared."""
        return math.exp(self._level)

    def predict(self, prompt: bytes) -> Prediction:
        """Return what is known about the next response to a prompt, by its key."""
        past = self._prompts.get(prompt)
        within = self._within.value
        between = max(1e-4, self._total.value - within)
        mean, variance = self._centre.value, between
        if past is not None:
            precision = past.seen / within + 1 / between
            mean = (past.mean * past.seen / within + mean / between) / precision
            variance = 1 / precision
        deviation = math.sqrt(variance + within)
        return Prediction(mean + self._level, deviation, self.limit, self._corrected, past is not None)

    def observe(self, batch: Iterable[tuple[bytes, Sequence[int]]]) -> None:
        """Take in the lengths of a whole batch: prompts by their key, and the lengths of their responses in tokens."""
        groups = [(key, [min(max(1, length), self.limit) for length in lengths]) for key, lengths in batch if lengths]
        if not groups:
            return
        self._judge(groups)
        self._follow(groups)
        for key, lengths in groups:
            self._remember(key, lengths)
        while len(self._prompts) > self._most:
            self._prompts.popitem(last=False)

    def _judge(self, groups: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        """Compare with what was predicted before."""
        for coverage in self.coverage.values():
            coverage.within *= FADE
            coverage.of *= FADE
        fresh = [0.0] * BINS
        for key, lengths in groups:
            prediction = self.predict(key)
            quantiles = [(share, prediction.quantile(share)) for share in SHARES]
            for length in lengths:
                # A quantile at the limit is right whatever comes; it would only flatter.
                for share, quantile in quantiles:
                    if quantile < self.limit:
                        self.coverage[share].of += 1
                        self.coverage[share].within += length <= quantile
                rank = min(prediction.rank(length), 1 - 1e-12)
                if length < self.limit:
                    fresh[int(rank * BINS)] += 1
                else:
                    _spread(fresh, rank)
        self._bins = [FADE * old + new for old, new in zip(self._bins, fresh, strict=True)]
        self._corrected = _cumulated(self._bins)

    def _follow(self, groups: Sequence[tuple[bytes, Sequence[int]]]) -> None:
        """Move the level by the residuals of the batch."""
        precision, weighted, count = 0.0, 0.0, 0
        for key, lengths in groups:
            prediction = self.predict(key)
            within = self._within.value
            # What a prompt is off by is common to its responses.
            variance = max(1e-6, prediction.deviation**2 - within) + within / len(lengths)
            residual = sum(map(math.log, lengths)) / len(lengths) - prediction.log_mean
            precision += 1 / variance
            weighted += residual / variance
            count += len(lengths)
        self._doubt += count * WALK**2
        gain = self._doubt * precision / (1 + self._doubt * precision)
        self._level += gain * weighted / precision
        self._doubt *= 1 - gain

    def _remember(self, key: bytes, lengths: Sequence[int]) -> None:
        values = [math.log(length) - self._level for length in lengths]
        mean = sum(values) / len(values)
        if len(values) > 1:
            spread = sum((value - mean) ** 2 for value in values) / (len(values) - 1)
            self._within.add(max(spread, 1e-6), len(values) - 1)
        past = self._prompts.get(key)
        if past is None:
            self._total.add(max((mean - self._centre.value) ** 2 + self._within.value * (1 - 1 / len(values)), 1e-4), 1)
            self._centre.add(mean, 1)
            past = self._prompts[key] = _Prompt(mean, 0)
        for value in values:
            past.seen = min(past.seen + 1, MEMORY)
            past.mean += (value - past.mean) / past.seen
        self._prompts.move_to_end(key)


@dataclass(slots=True)
class _Mean:
    """A mean that forgets after a few thousand values."""

    value: float
    weight: float

    def add(self, value: float, times: int) -> None:
        self.weight = min(self.weight + times, 4096.0)
        self.value += (value - self.value) * min(1.0, times / self.weight)


def _cumulated(bins: Sequence[float]) -> tuple[float, ...]:
    total = sum(bins)
    shares, so_far = [0.0], 0.0
    for weight in bins:
        so_far += weight / total
        shares.append(min(1.0, so_far))
    shares[-1] = 1.0
    return tuple(shares)


def _at(cumulated: Sequence[float], rank: float) -> float:
    place = min(max(rank, 0.0), 1.0) * BINS
    at = min(int(place), BINS - 1)
    return cumulated[at] + (place - at) * (cumulated[at + 1] - cumulated[at])


def _inverse(cumulated: Sequence[float], share: float) -> float:
    low, high = 0, BINS
    while high - low > 1:
        middle = (low + high) // 2
        if cumulated[middle] <= share:
            low = middle
        else:
            high = middle
    width = cumulated[high] - cumulated[low]
    return (low + ((share - cumulated[low]) / width if width > 0 else 0.0)) / BINS


def _spread(bins: list[float], rank: float) -> None:
    """Add a value that is known to be above `rank` and no more."""
    first = int(rank * BINS)
    parts = [first + 1 - rank * BINS] + [1.0] * (BINS - first - 1)
    for at, part in enumerate(parts):
        bins[first + at] += part / sum(parts)
