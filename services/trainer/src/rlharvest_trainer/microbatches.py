"""Cutting samples into micro-batches that fit a token budget, and laying one out as tensors.

Invariants of `plan`: every sample is in exactly one micro-batch; rows x longest row stays within the budget, except
that a sample longer than the budget goes alone; the result depends on the set of samples and not on the order they
came in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlharvest_trainer.batches import Sample


def plan(samples: Sequence[Sample], budget: int) -> list[list[Sample]]:
    """Return micro-batches of at most `budget` tokens, padding included.

    Samples of like length go together, which wastes least; ties are broken by group and handle, so that membership is
    fixed.
    """
    ordered = sorted(samples, key=lambda sample: (sample.length, sample.group, sample.handle))
    batches: list[list[Sample]] = []
    for sample in ordered:
        # Ascending lengths: this sample is the longest of the micro-batch that it joins.
        if batches and (len(batches[-1]) + 1) * sample.length <= budget:
            batches[-1].append(sample)
        else:
            batches.append([sample])
    return batches


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A micro-batch as tensors. Rows are padded on the right, so causal attention alone keeps padding out."""

    input_ids: Tensor
    """Shape (rows, columns), int64."""
    keep: Tensor
    """Shape (kept,), int64: the columns whose logits are needed, in a row without gaps."""
    rows: Tensor
    """Shape (tokens,), int64: row of each response token."""
    columns: Tensor
    """Shape (tokens,), int64: where in `keep` the logits that predict it are."""
    targets: Tensor
    """Shape (tokens,), int64: the response tokens."""
    behaviour: Tensor
    """Shape (tokens,), float32."""
    advantages: Tensor
    """Shape (tokens,), float32."""


def lay_out(samples: Sequence[Sample], device: torch.device) -> Layout:
    """Return the tensors of a micro-batch; the tokens are those of its responses, row after row."""
    width = max(sample.length for sample in samples)
    first = min(len(sample.prompt) for sample in samples) - 1
    ids = np.zeros((len(samples), width), dtype=np.int64)
    for row, sample in enumerate(samples):
        ids[row, : len(sample.prompt)] = sample.prompt
        ids[row, len(sample.prompt) : sample.length] = sample.ids
    counts = [len(sample.ids) for sample in samples]
    # The logits at a token's position predict the next one.
    columns = [np.arange(len(sample.prompt) - 1, sample.length - 1) - first for sample in samples]

    def tensor(values: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(device)

    return Layout(
        input_ids=tensor(ids),
        keep=torch.arange(first, width - 1, device=device),
        rows=tensor(np.repeat(np.arange(len(samples)), counts)),
        columns=tensor(np.concatenate(columns)),
        targets=tensor(np.concatenate([sample.ids for sample in samples]).astype(np.int64)),
        behaviour=tensor(np.concatenate([sample.logprobs for sample in samples]).astype(np.float32)),
        advantages=tensor(np.repeat(np.array([sample.advantage for sample in samples], dtype=np.float32), counts)),
    )
