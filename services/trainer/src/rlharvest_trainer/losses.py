"""The learning rule as pure functions of tensors: advantages, log-probabilities, the clipped objective, the KL
estimate.

Group relative policy optimisation (Shao et al. 2024, "DeepSeekMath", arXiv 2402.03300, section 4.1) with the
token-level normalisation of DAPO (Yu et al. 2025, arXiv 2503.14476, eq. 12). Everything here returns *sums* over
tokens: the caller adds micro-batches and divides once by the step's loss tokens, so the gradient doesn't depend on
how a step was cut up.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

STD_EPSILON = 1e-4
"""Added to a group's standard deviation; large against rounding, small against rewards of order 1."""

MAX_LOG_RATIO = 20.0
"""Log-ratios are cut here before exp, so that a wild sample gives a large number and not infinity."""

DUAL_CLIP = 10.0
"""Where the advantage is negative the ratio counts at most this much (dual clip: Ye et al. 2020, arXiv 1912.09729,
eq. 5)."""


def group_advantages(rewards: Tensor, *, scale: bool) -> Tensor:
    """Return A_i = (r_i − mean(r)) / (std(r) + ε), or without the division (Shao et al. 2024, section 4.1.2).

    The standard deviation is the sample's (n − 1). A group of one has no siblings to compare with: its advantage is its
    reward (REINFORCE without a baseline). A group of equal rewards gives exact zeros.

    Args:
        rewards: shape (n,), of all responses of one group, those masked out of the loss included.
        scale: divide by the standard deviation.

    Returns:
        Shape (n,), float64.
    """
    rewards = rewards.to(torch.float64)
    if rewards.numel() == 1:
        return rewards.clone()
    if bool((rewards == rewards[0]).all()):
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std(correction=1) + STD_EPSILON) if scale else centred


def token_logprobs(logits: Tensor, ids: Tensor, *, temperature: float, vocab: int = 0) -> tuple[Tensor, Tensor]:
    """Return log softmax(logits / temperature)[ids] and the entropy of that distribution.

    Args:
        logits: shape (tokens, vocabulary), any floating type; computed on in float32 at least.
        ids: shape (tokens,), the tokens whose log-probabilities are wanted.
        temperature: of the sampler; the policy that is trained is the one that sampled.
        vocab: ids at or above are never sampled, so they have no probability here either; 0: no mask.

    Returns:
        Two tensors of shape (tokens,), float32 (float64 for float64 logits); no gradient flows through the entropy.
    """
    scaled = logits if logits.dtype == torch.float64 else logits.float()
    if vocab and vocab < scaled.shape[-1]:
        scaled = scaled[..., :vocab]
    if temperature != 1.0:
        scaled = scaled / temperature
    normaliser = torch.logsumexp(scaled, dim=-1)
    chosen = scaled.gather(-1, ids.unsqueeze(-1)).squeeze(-1) - normaliser
    with torch.no_grad():
        entropy = normaliser - (torch.softmax(scaled, dim=-1) * scaled).sum(-1)
    return chosen, entropy


def kl_k3(policy: Tensor, reference: Tensor) -> Tensor:
    """Return the estimate of KL(policy ‖ reference) for each token: exp(d) − d − 1 with d = reference − policy.

    Unbiased for samples of the policy and never negative (Schulman 2020, "Approximating KL divergence", k3; Shao et al.
    2024, eq. 4).
    """
    difference = (reference - policy).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return torch.exp(difference) - difference - 1.0


@dataclass(frozen=True, slots=True)
class Objective:
    """What the objective needs besides log-probabilities."""

    epsilon: float
    epsilon_high: float
    beta: float


@dataclass(frozen=True, slots=True)
class LossTerms:
    """Sums over the tokens of a micro-batch, and each token's share of what people watch."""

    loss: Tensor
    """Scalar with a gradient: the negative objective, not normalised."""
    ratio: Tensor
    """Shape (tokens,): π_θ / π_behaviour, without gradient."""
    low: Tensor
    """Shape (tokens,), bool: clipped below with a negative advantage."""
    high: Tensor
    """Shape (tokens,), bool: clipped above with a positive advantage."""
    kl: Tensor | None
    """Shape (tokens,), without gradient; None without a reference."""


def clipped_loss(
    policy: Tensor, behaviour: Tensor, advantages: Tensor, objective: Objective, reference: Tensor | None = None
) -> LossTerms:
    """Return −Σ_t [min(ρ_t A_t, clip(ρ_t, 1 − ε, 1 + ε_high) A_t) − β KL_t] with ρ_t = exp(policy_t − behaviour_t).

    Schulman et al. 2017 (arXiv 1707.06347), eq. 7, with the asymmetric bounds of DAPO (eq. 10) and the KL term inside
    the objective (Shao et al. 2024, eq. 3). The denominator of ρ is the policy that sampled the token, whatever its
    version.

    Args:
        policy: log-probabilities of the tokens under the model, shape (tokens,), with gradient.
        behaviour: those that the workers sent, shape (tokens,).
        advantages: of each token's response, shape (tokens,).
        reference: log-probabilities under the frozen initial model; needed where beta > 0.
    """
    ratio = torch.exp((policy - behaviour).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))
    clipped = ratio.clamp(1.0 - objective.epsilon, 1.0 + objective.epsilon_high)
    gain = torch.minimum(ratio * advantages, clipped * advantages)
    gain = torch.where(advantages < 0, torch.maximum(gain, DUAL_CLIP * advantages), gain)
    loss = -gain.sum()
    kl = None
    if objective.beta > 0:
        assert reference is not None, "beta > 0 needs the reference's log-probabilities"
        divergence = kl_k3(policy, reference)
        loss = loss + objective.beta * divergence.sum()
        kl = divergence.detach()
    ratio = ratio.detach()
    return LossTerms(
        loss=loss,
        ratio=ratio,
        low=(ratio < 1.0 - objective.epsilon) & (advantages < 0),
        high=(ratio > 1.0 + objective.epsilon_high) & (advantages > 0),
        kl=kl,
    )
