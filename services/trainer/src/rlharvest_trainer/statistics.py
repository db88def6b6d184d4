"""What people watch of a step, under TRL's names, summed as micro-batches go by."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from rlharvest_trainer.batches import Group
from rlharvest_trainer.losses import LossTerms


@dataclass(slots=True)
class StepStatistics:
    """Running sums of one step; `metrics` turns them into means."""

    rewards: list[float] = field(default_factory=list)
    group_stds: list[float] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    staleness: list[int] = field(default_factory=list)
    clipped: int = 0
    masked: int = 0
    tokens: int = 0
    """Prompt and response tokens of the step."""
    loss_tokens: int = 0
    entropy: float = 0.0
    kl: float | None = None
    low: int = 0
    high: int = 0
    ratio_sum: float = 0.0
    ratio_min: float = math.inf
    ratio_max: float = -math.inf
    difference_sum: float = 0.0
    difference_max: float = 0.0

    def add_group(self, group: Group) -> None:
        """Count a group's rewards and lengths."""
        self.rewards.extend(group.rewards)
        self.group_stds.append(float(np.std(group.rewards, ddof=1)) if len(group.rewards) > 1 else 0.0)
        self.lengths.extend(group.lengths)
        self.staleness.append(group.staleness)
        self.clipped += group.clipped
        self.masked += sum(not sample.in_loss for sample in group.samples)
        self.tokens += sum(sample.length for sample in group.samples)

    def add_tokens(self, policy: Tensor, behaviour: Tensor, entropy: Tensor, terms: LossTerms) -> None:
        """Count the response tokens of a micro-batch; all tensors of shape (tokens,)."""
        difference = (policy - behaviour).abs()
        self.loss_tokens += policy.numel()
        self.entropy += float(entropy.sum())
        self.low += int(terms.low.sum())
        self.high += int(terms.high.sum())
        self.ratio_sum += float(terms.ratio.double().sum())
        self.ratio_min = min(self.ratio_min, float(terms.ratio.min()))
        self.ratio_max = max(self.ratio_max, float(terms.ratio.max()))
        self.difference_sum += float(difference.double().sum())
        self.difference_max = max(self.difference_max, float(difference.max()))
        if terms.kl is not None:
            self.kl = (self.kl or 0.0) + float(terms.kl.sum(dtype=torch.float64))

    def metrics(self) -> dict[str, float]:
        """Return the step's metrics; token means are over the tokens that count in the loss."""
        values: dict[str, float] = {}
        if self.rewards:
            stds = np.array(self.group_stds)
            values |= {
                "reward": float(np.mean(self.rewards)),
                "reward_std": float(stds.mean()),
                "frac_reward_zero_std": float((stds == 0).mean()),
                "completions/mean_length": float(np.mean(self.lengths)),
                "completions/min_length": float(min(self.lengths)),
                "completions/max_length": float(max(self.lengths)),
                "completions/clipped_ratio": self.clipped / len(self.rewards),
                "completions/masked_ratio": self.masked / len(self.rewards),
                "staleness/mean": float(np.mean(self.staleness)),
                "staleness/max": float(max(self.staleness)),
            }
        if self.loss_tokens:
            n = self.loss_tokens
            values |= {
                "entropy": self.entropy / n,
                "clip_ratio/low_mean": self.low / n,
                "clip_ratio/high_mean": self.high / n,
                "clip_ratio/region_mean": (self.low + self.high) / n,
                "sampling/importance_sampling_ratio/min": self.ratio_min,
                "sampling/importance_sampling_ratio/mean": self.ratio_sum / n,
                "sampling/importance_sampling_ratio/max": self.ratio_max,
                "sampling/sampling_logp_difference/mean": self.difference_sum / n,
                "sampling/sampling_logp_difference/max": self.difference_max,
            }
            if self.kl is not None:
                values["kl"] = self.kl / n
        return values
