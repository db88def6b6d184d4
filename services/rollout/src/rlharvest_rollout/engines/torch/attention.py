"""Softmax attention over a cache, whole or in blocks of keys.

In blocks, the sums over keys run block after block in ascending order, so a query's bits do not depend on how far the
cache of its neighbours reaches: a block behind its own end adds exact zeros. The maximum is taken over all keys first;
it is exact in any order, so no partial sum needs rescaling.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return softmax(q kᵀ / √head_dim + bias) v, in whatever order is fastest.

    Args:
        q: (n, queries, head_dim).
        k, v: (n, keys, head_dim); strides may be anything between the n.
        bias: broadcasts to (n, queries, keys); -inf hides a key.

    Returns:
        (n, queries, head_dim).
    """
    scores = torch.baddbmm(bias, q, k.transpose(1, 2), alpha=q.shape[-1] ** -0.5)
    return torch.bmm(scores.softmax(-1), v)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, block: int) -> Tensor:
    """Return the same as `attend`, reduced in blocks of `block` keys; their number is a multiple of it."""
    parts = list(zip(torch.split(k, block, 1), torch.split(v, block, 1), torch.split(bias, block, -1), strict=True))
    scale = q.shape[-1] ** -0.5
    scores = torch.stack([torch.baddbmm(b, q, k.transpose(1, 2), alpha=scale) for k, _, b in parts])
    weights = scores.sub_(scores.amax((0, -1), keepdim=True)).exp_()
    sums = weights.sum(-1, keepdim=True)
    out, total = torch.bmm(weights[0], parts[0][1]), sums[0]
    for index in range(1, len(parts)):
        out.baddbmm_(weights[index], parts[index][1])
        # One after the other; a sum over this axis would pair the blocks by their number.
        total.add_(sums[index])
    return out.div_(total)
