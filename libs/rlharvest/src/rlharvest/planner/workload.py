"""What a job asks of the machines: the shape of its model, and tokens a step.

Invariant: nothing is guessed silently; what a configuration does not say, and lengths that nobody has measured, are named
errors or documented defaults.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rlharvest.errors import InvalidField
from rlharvest.jobs.model import JobSpec

SPREAD = 0.99
"""Standard deviation of the logarithm of lengths: the 99th percentile is ten medians (Laminar, arXiv 2510.12633)."""

MEDIAN = 6
"""The limit is so many medians, where nothing is measured: about 2,400 tokens at a limit of 14,000, as RLBoost's jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A transformer, as far as its cost goes."""

    parameters: float
    active: float
    """Parameters that a token goes through: fewer than all of them in a mixture of experts."""
    layers: int
    hidden: int
    vocabulary: int
    kv_bytes: float
    """Of one token of context, in all layers."""
    weight_bytes: float
    """As the engine holds them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One optimizer step."""

    shape: Shape
    responses: int
    prompt_tokens: float
    """Mean of a prompt."""
    response_tokens: float
    """Mean of a response."""
    context_tokens: float
    """Mean context of a running sequence over time: long ones run longer."""
    longest: float
    """Tokens of the longest sequence, prompt included."""
    inflight: int
    """Most responses that may run at a time, by the staleness bound."""
    slots: int
    """Most responses on one replica."""
    micro_batch_tokens: int
    forwards: int
    """Forward passes of a step besides that of the gradient: recomputed log-probabilities, the reference model."""
    overlaps: bool
    """Training and rollout go on at the same time (staleness of 1 or more); else one waits for the other."""

    @property
    def generated(self) -> float:
        """Response tokens of a step."""
        return self.responses * self.response_tokens

    @property
    def trained(self) -> float:
        """Tokens that a step computes on, prompts included."""
        return self.responses * (self.prompt_tokens + self.response_tokens)


def shape(config: Mapping[str, Any], *, bytes_per_weight: int = 2) -> Shape:
    """Return the shape that a Hugging Face `config.json` describes.

    Raises:
        InvalidField: a number that is needed is not in it.
    """
    config = config.get("text_config", config)
    hidden, layers = _count(config, "hidden_size"), _count(config, "num_hidden_layers")
    heads, vocabulary = _count(config, "num_attention_heads"), _count(config, "vocab_size")
    kv_heads = _count(config, "num_key_value_heads", heads)
    width = _count(config, "head_dim", hidden // heads)
    experts = _count(config, "num_experts", _count(config, "num_local_experts", 1))
    chosen = min(experts, _count(config, "num_experts_per_tok", experts))
    inner = _count(config, "moe_intermediate_size", 0) if experts > 1 else 0
    inner = inner or _count(config, "intermediate_size")
    attention = 2 * hidden * heads * width + 2 * hidden * kv_heads * width
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    block, active_block = attention + 3 * hidden * inner * experts, attention + 3 * hidden * inner * chosen
    parameters = float(layers * block + embeddings)
    return Shape(
        parameters=parameters,
        # The input embedding is a look-up; the output one is a product with every token.
        active=float(layers * active_block + vocabulary * hidden),
        layers=layers,
        hidden=hidden,
        vocabulary=vocabulary,
        kv_bytes=float(layers * kv_heads * width * 2 * bytes_per_weight),
        weight_bytes=parameters * bytes_per_weight,
    )


def workload(
    job: JobSpec, model: Shape, *, prompt_tokens: float | None = None, response_tokens: float | None = None
) -> Workload:
    """Return what one step of a job asks for.

    Args:
        prompt_tokens: mean of a prompt; unset: half of dataset.max_prompt_length.
        response_tokens: mean of a response; unset: of a lognormal distribution cut at the limit, whose median is a MEDIAN-th
            of it and whose logarithm has a deviation of SPREAD.
    """
    limit = job.sampling.max_completion_length
    prompt = prompt_tokens if prompt_tokens is not None else job.dataset.max_prompt_length / 2
    mean, square = _cut_lognormal(math.log(limit / MEDIAN), limit)
    if response_tokens is not None:
        if not 0 < response_tokens <= limit:
            raise InvalidField(
                "response tokens", response_tokens, f"not between 1 and the job's limit of {limit}", "Give a mean."
            )
        square *= (response_tokens / mean) ** 2
        mean = response_tokens
    responses = job.algorithm.prompts_per_step * job.sampling.num_generations
    eta = job.staleness.max_staleness
    return Workload(
        shape=model,
        responses=responses,
        prompt_tokens=prompt,
        response_tokens=mean,
        context_tokens=prompt + min(square / (2 * mean), limit / 2),
        longest=job.dataset.max_prompt_length + limit,
        inflight=responses * (eta + 1),
        slots=job.rollout.max_inflight_per_worker,
        micro_batch_tokens=job.algorithm.micro_batch_tokens,
        forwards=1 + (job.algorithm.beta > 0),
        overlaps=eta > 0,
    )


def _cut_lognormal(log_median: float, limit: float) -> tuple[float, float]:
    """Return mean and mean square of a lognormal variable that is cut at `limit`."""

    def below(z: float) -> float:
        return 0.5 * math.erfc(-z / math.sqrt(2))

    z = (math.log(limit) - log_median) / SPREAD
    moments = []
    for order in (1, 2):
        whole = math.exp(order * log_median + (order * SPREAD) ** 2 / 2)
        moments.append(whole * below(z - order * SPREAD) + limit**order * (1 - below(z)))
    return moments[0], moments[1]


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 0 or (default is None and value == 0):
        raise InvalidField(
            f"config.{key}", config.get(key), "not a number of this model", "Give the model's own config.json."
        )
    return value
