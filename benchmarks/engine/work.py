"""What is asked of every engine alike: prompts of random tokens, and how many tokens each response has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

PROMPT = 16
"""Tokens of a prompt; all prompts are as long, so that nobody pads."""

FIRST_ID, LAST_ID = 100, 40_000
"""Prompts are made of ids between; the special ones lie below."""

_MEDIAN, _LONGEST = 5, 40
"""Tokens of lognormal lengths: their median, and where they are cut."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Some responses to generate."""

    batch: int
    """Most at a time."""
    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    temperature: float = 1.0
    seed: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(self.lengths)


def equal(batch: int, length: int, seed: int, temperature: float = 1.0) -> Work:
    """Return a batch of responses of one length."""
    return _work(batch, [length] * batch, seed, temperature)


def lognormal(batch: int, seed: int) -> Work:
    """Return two batches of responses whose lengths are lognormal with sigma 1."""
    drawn = np.random.default_rng(seed).lognormal(np.log(_MEDIAN), 1.0, 2 * batch)
    return _work(batch, np.clip(np.rint(drawn), 1, _LONGEST).astype(int).tolist(), seed, 1.0)


def _work(batch: int, lengths: Sequence[int], seed: int, temperature: float) -> Work:
    ids = np.random.default_rng(seed).integers(FIRST_ID, LAST_ID, (len(lengths), PROMPT))
    return Work(
        batch=batch,
        prompts=tuple(tuple(row) for row in ids.tolist()),
        lengths=tuple(lengths),
        temperature=temperature,
        seed=seed,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """What an engine made of it."""

    tokens: int
    seconds: float
    """Of the clock that the lane was given."""
    ids: tuple[tuple[int, ...], ...] = ()
    logprobs: tuple[tuple[float, ...], ...] = ()

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds
