"""What a policy is asked for, what its responses are worth, and how much of that a run measures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Prompts for one policy, by their numbers from 0."""

    prompts: Mapping[int, list[int]]
    reward: Callable[[int, Sequence[int]], float]
    """Of a response to the prompt with this number."""
    eos: int
    vocab: int
    """Ids at or above are never sampled."""
    length: int
    """Most tokens of a response, the end-of-sequence token included."""
    samples: int
    """Responses to each prompt."""
    batches: Mapping[int, int]
    """Prompts of a round for each size of batch."""
    warm_up: int
    """Steps that are not measured, about: in them the switch finds out what drafts are good for."""
    learning_rate: float
    """Of the steps between the epochs."""
    trained: int
    """Most responses of the first epoch that these steps learn from."""

    def rounds_of_warm_up(self, batch: int) -> int:
        """Return the rounds that are not measured."""
        return -(-self.warm_up * batch // (self.batches[batch] * self.samples * self.length))
