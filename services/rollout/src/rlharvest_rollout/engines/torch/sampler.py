"""From logits to tokens: truncate, then invert the cumulative distribution at the response's own uniform.

All of it is float64 and row by row, so a row's token and log-probability depend on its logits and its uniform alone.
The cumulative sum runs in vocabulary order: the same uniform picks the same token whoever computes it. A token of
weight zero is never picked.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from rlharvest.engine import Sampling
from rlharvest.errors import RlharvestError
from torch import Tensor


class NotFinite(RlharvestError):
    """The model gives logits that are not finite numbers."""


def sample(
    logits: Tensor, sampling: Sampling, uniforms: Sequence[float], *, vocab: int
) -> tuple[list[int], list[float]]:
    """Return a token for each row, and its log-probability under the distribution it was drawn from.

    At temperature 0 it is the most likely token, with its log-probability at temperature 1. Ties at the edge of top-k
    are all kept; top-p keeps the fewest most likely tokens whose probabilities reach it, among what top-k left, and
    min-p those of at least `min_p` times the most likely one's.

    Args:
        logits: (rows, at least vocab).
        uniforms: one a row, in [0, 1).
        vocab: rows of the model's head; ids from there on, or from `sampling.vocab` on, are never sampled.

    Raises:
        NotFinite: a row has no finite distribution.
    """
    scores = logits.double()
    scores[:, min(vocab, sampling.vocab or vocab) :] = -math.inf
    if sampling.temperature > 0:
        scores = truncate(scores.div_(sampling.temperature), sampling)
    peak = scores.amax(-1, keepdim=True)
    weights = (scores - peak).exp_()
    cumulative = weights.cumsum(-1)
    total = cumulative[:, -1:]
    if not bool(torch.isfinite(total).all()):
        raise NotFinite
    if sampling.temperature > 0:
        at = torch.tensor(uniforms, dtype=torch.float64, device=logits.device).unsqueeze(-1) * total
        # Rounding up to the total itself would run off the end.
        below = torch.nextafter(total, torch.zeros_like(total))
        ids = torch.searchsorted(cumulative, torch.minimum(at, below), right=True)
    else:
        ids = scores.argmax(-1, keepdim=True)
    logprobs = scores.gather(-1, ids) - peak - total.log()
    return ids[:, 0].tolist(), logprobs[:, 0].tolist()


def truncate(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return the scores with what top-k, top-p and min-p cut off at -inf."""
    if 0 < sampling.top_k < scores.shape[-1]:
        least = scores.topk(sampling.top_k, -1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -math.inf)
    if sampling.top_p < 1:
        ordered, order = scores.sort(dim=-1, descending=True, stable=True)
        shares = ordered.softmax(-1)
        above = shares.cumsum(-1) - shares
        scores = scores.masked_fill(
            torch.zeros_like(scores, dtype=torch.bool).scatter(-1, order, above >= sampling.top_p), -math.inf
        )
    if sampling.min_p > 0:
        least = scores.amax(-1, keepdim=True) + math.log(sampling.min_p)
        scores = scores.masked_fill(scores < least, -math.inf)
    return scores
