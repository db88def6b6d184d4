"""Groups as the trainer computes on them, checked once where they come off the wire.

Invariants: a group's samples are in the order of their handles; ids, log-probabilities and version runs of a sample
have one length; every number is finite; every id is in the vocabulary. What breaks one is BadGroup: the group is left
out of the step and reported, the rest of the step goes on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from rlharvest.errors import CorruptData
from rlharvest.spans import MAX_LOGPROB, Ids, Logprobs, as_ids, as_logprobs
from rlharvest.v1 import batches_pb2, spans_pb2

from rlharvest_trainer.losses import group_advantages


class BadGroup(CorruptData):
    """A group cannot be trained on."""

    def __init__(self, group: int, problem: str) -> None:
        self.group = group
        super().__init__(f"group {group}: {problem}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One response, ready for the loss."""

    group: int
    handle: int
    prompt: Ids
    """Shape (p,)."""
    ids: Ids
    """Shape (n,)."""
    logprobs: Logprobs
    """Shape (n,), of the behaviour policy at the job's temperature."""
    advantage: float
    in_loss: bool
    """False: it counted in the group's baseline, and that is all."""

    @property
    def length(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt) + len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The responses to one prompt, and what is reported of them."""

    ordinal: int
    staleness: int
    samples: tuple[Sample, ...]
    rewards: tuple[float, ...]
    lengths: tuple[int, ...]
    """Tokens of each response."""
    clipped: int
    """Responses that hit the length limit."""


def decode_group(group: batches_pb2.BatchGroup, *, vocab: int, scale_rewards: bool, mask_truncated: bool) -> Group:
    """Return a group of a NextBatch reply.

    Args:
        vocab: ids at or above do not exist.
        scale_rewards: divide the advantages by the group's standard deviation.
        mask_truncated: leave responses that hit the length limit out of the loss.

    Raises:
        BadGroup: names the response and what is wrong with it.
    """
    samples = sorted(group.samples, key=lambda sample: sample.handle)
    if not samples:
        raise BadGroup(group.group, "it has no responses")
    try:
        prompt = as_ids(group.prompt_ids)
        decoded = [_tokens(sample) for sample in samples]
    except CorruptData as error:
        raise BadGroup(group.group, str(error)) from error
    if not len(prompt):
        raise BadGroup(group.group, "its prompt is empty")
    if int(prompt.max()) >= vocab:
        raise BadGroup(group.group, f"prompt id {int(prompt.max())} is outside the vocabulary of {vocab}")
    for sample, (ids, _) in zip(samples, decoded, strict=True):
        if len(ids) and int(ids.max()) >= vocab:
            raise BadGroup(
                group.group, f"{sample.response_id} holds id {int(ids.max())}, outside the vocabulary of {vocab}"
            )
    rewards = [sample.reward for sample in samples]
    advantages = group_advantages(torch.tensor(rewards, dtype=torch.float64), scale=scale_rewards).tolist()
    truncated = [sample.finish == spans_pb2.FINISH_LENGTH for sample in samples]
    return Group(
        ordinal=group.group,
        staleness=group.staleness,
        samples=tuple(
            Sample(
                group=group.group,
                handle=sample.handle,
                prompt=prompt,
                ids=ids,
                logprobs=logprobs,
                advantage=advantage,
                in_loss=bool(len(ids)) and not sample.masked and not (mask_truncated and cut),
            )
            for sample, (ids, logprobs), advantage, cut in zip(samples, decoded, advantages, truncated, strict=True)
        ),
        rewards=tuple(rewards),
        lengths=tuple(len(ids) for ids, _ in decoded),
        clipped=sum(truncated),
    )


def _tokens(sample: batches_pb2.BatchSample) -> tuple[Ids, Logprobs]:
    name = sample.response_id or f"response {sample.handle}"
    if not math.isfinite(sample.reward):
        raise CorruptData(f"{name} has the reward {sample.reward}, which is not finite")
    ids, logprobs = as_ids(sample.ids), as_logprobs(sample.logprobs)
    if len(ids) != len(logprobs):
        raise CorruptData(f"{name} has {len(ids)} ids and {len(logprobs)} log-probabilities")
    if sum(sample.run_n) != len(ids) or len(sample.run_n) != len(sample.run_version):
        raise CorruptData(f"{name} has version runs over {sum(sample.run_n)} tokens and {len(ids)} ids")
    if len(ids) and not bool(np.isfinite(logprobs).all() and (logprobs <= MAX_LOGPROB).all()):
        raise CorruptData(f"{name} has a log-probability that is not finite or above 0")
    return ids, logprobs
