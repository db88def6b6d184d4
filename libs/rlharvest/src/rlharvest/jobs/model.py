"""The job: one training run, as users write it in YAML or JSON and as REST takes it.

Invariants: cross-field checks say what to type instead. Names are TRL's where TRL has one (aliases.py maps the names of
others). The model imports no torch and no web framework, so any client can validate with it. Everything of it is imported
from here; the blocks that it is made of are written in blocks.py.
"""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Any

from pydantic import Field, ValidationError, model_validator

from rlharvest.errors import InvalidField
from rlharvest.jobs import aliases
from rlharvest.jobs.blocks import (
    MOST_STOP_CHARACTERS,
    Algorithm,
    Block,
    Checkpoint,
    Dataset,
    Limits,
    Reward,
    Rollout,
    Sampling,
    Seed,
    Staleness,
    WeightsBlock,
)

__all__ = [
    "MOST_GROUP_TOKENS",
    "MOST_KEY_CHARACTERS",
    "MOST_LIVE_RESPONSES",
    "MOST_RESPONSES",
    "MOST_STOP_CHARACTERS",
    "MOST_VALUE_CHARACTERS",
    "Algorithm",
    "Block",
    "Checkpoint",
    "Dataset",
    "JobSpec",
    "Limits",
    "Reward",
    "Rollout",
    "Sampling",
    "Staleness",
    "WeightsBlock",
    "parse",
]

MOST_KEY_CHARACTERS, MOST_VALUE_CHARACTERS = 64, 512
"""Of one entry of the metadata."""

MetadataKey = Annotated[str, Field(max_length=MOST_KEY_CHARACTERS)]
MetadataValue = Annotated[str, Field(max_length=MOST_VALUE_CHARACTERS)]

MOST_GROUP_TOKENS = 4_000_000
"""num_generations x max_completion_length: a batch is handed to the trainer in messages that hold a whole group."""

MOST_LIVE_RESPONSES = 1_000_000
"""prompts_per_step x num_generations x (max_staleness + 1): what the ledger may have to hold at a time."""

MOST_RESPONSES = 2**30
"""max_steps x prompts_per_step x num_generations: a response's number in its job has 31 bits (those from 2^31 on are the
gateway's), and dropped groups take some."""


class JobSpec(Block):
    """One training run."""

    name: str = Field("", max_length=200)
    """For people."""

    model: str = Field(min_length=1, max_length=4096)
    """A Hugging Face directory under one of the server's model roots (config, tokenizer, safetensors), or a hub name."""

    tokenizer: str | None = Field(None, max_length=4096)
    """Another directory for the tokenizer; unset: the model's."""

    dataset: Dataset
    rewards: list[Reward] = Field(min_length=1, max_length=32)
    sampling: Sampling = Sampling()
    algorithm: Algorithm = Algorithm()
    staleness: Staleness = Staleness()
    rollout: Rollout = Rollout()
    weights: WeightsBlock = WeightsBlock()
    checkpoint: Checkpoint = Checkpoint()
    limits: Limits = Limits()

    seed: Seed = 0
    """Of the data order, the sampling noise and the trainer."""

    metadata: dict[MetadataKey, MetadataValue] = Field(default_factory=dict, max_length=64)
    """Kept and shown, not read."""

    @model_validator(mode="after")
    def _fits_together(self) -> JobSpec:
        if self.algorithm.scale_rewards == "group" and self.sampling.num_generations < 2:
            raise ValueError(
                "sampling.num_generations: 1 has no group to compare with. Use 2 or more, or algorithm.scale_rewards: none"
            )
        n, size = self.sampling.num_generations, self.algorithm.prompts_per_step
        for names, value, most in (
            (
                "sampling.num_generations x sampling.max_completion_length",
                n * self.sampling.max_completion_length,
                MOST_GROUP_TOKENS,
            ),
            (
                "algorithm.prompts_per_step x sampling.num_generations x (staleness.max_staleness + 1)",
                size * n * (self.staleness.max_staleness + 1),
                MOST_LIVE_RESPONSES,
            ),
            (
                "limits.max_steps x algorithm.prompts_per_step x sampling.num_generations",
                self.limits.max_steps * size * n,
                MOST_RESPONSES,
            ),
        ):
            if value > most:
                raise ValueError(f"{names} = {value}: the limit is {most}. Make one of them smaller")
        return self

    @property
    def deterministic(self) -> bool:
        """Whether versions repeat bit for bit from run to run."""
        chosen = self.algorithm.deterministic
        return self.staleness.max_staleness == 0 if chosen is None else chosen

    @property
    def batch_invariant(self) -> bool:
        """Whether the torch engine continues bit for bit."""
        chosen = self.rollout.batch_invariant
        return self.staleness.max_staleness == 0 if chosen is None else chosen

    @property
    def sampling_seed(self) -> int:
        """Seed of the sampling noise."""
        return self.seed if self.sampling.seed is None else self.sampling.seed

    def digest(self) -> str:
        """Return a digest that is equal for equal jobs: 64 hexadecimal digits."""
        canonical = json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(canonical.encode()).hexdigest()


def parse(values: Any) -> JobSpec:
    """Return the job that `values` (from YAML, JSON or a REST body) describe.

    Raises:
        InvalidField: with the dotted path, the value and what to do.
    """
    if not isinstance(values, dict):
        raise InvalidField(
            "job", values, "not a mapping", "Write `model:`, `dataset:` and `rewards:` at the top level."
        )
    try:
        return JobSpec.model_validate(aliases.apply(values))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "job"
        message = first["msg"].removeprefix("Value error, ")
        raise InvalidField(field, first.get("input"), message, "docs/job.md lists every field.") from error
