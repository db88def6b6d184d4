"""Softmax attention over a cache, whole or in blocks of keys.

In blocks, the sums over keys run block after block in ascending order, so a query's bits do not depend on how far the
cache of its neighbours reaches: a block behind its own end adds exact zeros. The maximum is taken over all keys first;
it is exact in any order, so no partial sum needs rescaling.
"""

from __future__ import annotations

import torch
from torch import Tensor


def attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """Return softmax(q kᵀ + bias) v, in whatever order is fastest.

    Args:
        q: (n, queries, head_dim), scaled already.
        k, v: (n, keys, head_dim); strides may be anything between the n.
        bias: broadcasts to (n, queries, keys); -inf hides a key.

    Returns:
        (n, queries, head_dim).
    """
    scores = torch.bmm(q, k.transpose(1, 2)).add_(bias)
    return torch.bmm(scores.softmax(-1), v)


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, block: int) -> Tensor:
    """Return the same as `attend`, reduced in blocks of `block` keys; their number is a multiple of it."""
    blocks = range(0, k.shape[1], block)
    scores = torch.stack([torch.bmm(q, k[:, at : at + block].transpose(1, 2)) for at in blocks])
    scores += bias.view(*bias.shape[:2], len(blocks), block).movedim(-2, 0)
    weights = scores.sub_(scores.amax((0, -1), keepdim=True)).exp_()
    out = torch.bmm(weights[0], v[:, :block])
    for index, at in enumerate(blocks[1:], 1):
        out.baddbmm_(weights[index], v[:, at : at + block])
    # cumsum adds one after the other; sum would pair blocks by their number.
    return out.div_(weights.sum(-1).cumsum(0)[-1].unsqueeze(-1))
