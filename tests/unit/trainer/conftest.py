"""Tiny random models for the trainer's tests."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from rlharvest.testing.batches import random_group
from rlharvest_trainer.batches import Group, Sample, decode_group
from rlharvest_trainer.losses import Objective
from rlharvest_trainer.optimizer import AdamWConfig
from rlharvest_trainer.step import StepConfig
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB = 32


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def make_model() -> Callable[..., LlamaForCausalLM]:
    """Return a maker of tiny Llamas; equal seeds give equal models."""

    def make(seed: int = 0, *, tied: bool = True, vocab: int = VOCAB) -> LlamaForCausalLM:
        torch.manual_seed(seed)
        config = LlamaConfig(
            vocab_size=vocab,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=128,
            tie_word_embeddings=tied,
            initializer_range=0.2,
        )
        return LlamaForCausalLM(config).eval()

    return make


@pytest.fixture
def model_dir(tmp_path: Path, make_model: Callable[..., LlamaForCausalLM]) -> Path:
    """A directory with a tiny model."""
    make_model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def make_group() -> Callable[..., Group]:
    """Return a maker of decoded random groups."""

    def make(ordinal: int, *, n: int = 4, seed: int = 0, lengths: tuple[int, int] = (2, 8)) -> Group:
        message = random_group(seed, group=ordinal, n=n, vocab=VOCAB, lengths=lengths)
        return decode_group(message, vocab=VOCAB, scale_rewards=True, mask_truncated=False)

    return make


@pytest.fixture
def step_config() -> Callable[..., StepConfig]:
    """Return a maker of step settings."""

    def make(
        *, beta: float = 0.0, temperature: float = 1.0, budget: int = 64, vocab: int = 0, weight_decay: float = 0.0
    ) -> StepConfig:
        return StepConfig(
            objective=Objective(epsilon=0.2, epsilon_high=0.28, beta=beta),
            adamw=AdamWConfig(max_grad_norm=1e9, weight_decay=weight_decay),
            temperature=temperature,
            vocab=vocab,
            micro_batch_tokens=budget,
        )

    return make


@pytest.fixture
def make_sample() -> Callable[..., Sample]:
    """Return a maker of samples of given lengths."""

    def make(prompt: int, response: int, *, group: int = 0, handle: int = 0, advantage: float = 1.0) -> Sample:
        source = np.random.default_rng(handle)
        return Sample(
            group=group,
            handle=handle,
            prompt=source.integers(0, VOCAB, prompt).astype(np.uint32),
            ids=source.integers(0, VOCAB, response).astype(np.uint32),
            logprobs=np.full(response, -3.0, dtype=np.float32),
            advantage=advantage,
            in_loss=True,
        )

    return make
