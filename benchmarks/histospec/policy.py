"""The small policy: a Llama over characters that counts, trained for a short while; and policy gradients for any policy.

The task: `37>` is to be answered by the numbers that follow, `38,39,40,…`, as many as fit. A network of 0.3 million weights
learns it within seconds, so its responses have little entropy, as those of a policy that was trained for a task do.
"""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.utils import logging

from benchmarks.histospec.task import Task

CHARACTERS = "0123456789,>"
EOS = len(CHARACTERS)
LENGTH = 96
"""Tokens of a response, the end-of-sequence token included."""
NUMBERS = 900
"""Prompts start at a number below."""
BATCH = 16
LEARNING_RATE = 3e-3


def prompt_of(number: int) -> list[int]:
    """Return the prompt that starts at a number."""
    return [CHARACTERS.index(character) for character in f"{number:03d}>"]


def answer_of(number: int) -> list[int]:
    """Return the response that is right: as many of the next numbers as fit."""
    text = ",".join(f"{number + step:03d}" for step in range(1, 100))[: LENGTH - 1]
    return [CHARACTERS.index(character) for character in text] + [EOS]


def reward_of(number: int, ids: Sequence[int]) -> float:
    """Return the share of a response that is right."""
    right = answer_of(number)
    return sum(a == b for a, b in zip(ids, right, strict=False)) / len(right)


def counting() -> Task:
    """Return the task."""

    def start(number: int) -> int:
        return (31 * number + 7) % NUMBERS

    return Task(
        prompts={number: prompt_of(start(number)) for number in range(NUMBERS)},
        reward=lambda number, ids: reward_of(start(number), ids),
        eos=EOS,
        vocab=EOS + 1,
        length=LENGTH,
        samples=4,
        batches={1: 1, 4: 2, 32: 8},
        warm_up=360,
        learning_rate=2e-4,
        trained=100_000,
    )


logging.disable_progress_bar()


class Student:
    """A fresh policy that learns the task by supervision, as far as it is let."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self._model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=64,
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=4,
                num_key_value_heads=4,
                max_position_embeddings=256,
                initializer_range=1 / math.sqrt(128),
                tie_word_embeddings=True,
                bos_token_id=None,
                eos_token_id=EOS,
            )
        )
        self._optimizer = torch.optim.AdamW(self._model.parameters(), lr=LEARNING_RATE, weight_decay=0.01)
        self._random = random.Random(seed)
        self.steps = 0

    def learn(self, steps: int) -> None:
        """Take so many more optimizer steps."""
        for _ in range(steps):
            rows = [self._random.randrange(NUMBERS) for _ in range(BATCH)]
            tokens = torch.tensor([prompt_of(row) + answer_of(row) for row in rows])
            labels = tokens.clone()
            labels[:, : len(prompt_of(0))] = -100
            self.steps += 1
            loss = self._model(input_ids=tokens, labels=labels).loss
            _step(self._model, self._optimizer, loss, LEARNING_RATE * min(1, self.steps / 20))

    def save(self, directory: Path) -> Path:
        """Save as a Hugging Face directory; return that."""
        self._model.save_pretrained(directory)
        return directory


def moved(source: Path, target: Path, samples: Sequence[tuple[list[int], list[int], float]], *, rate: float) -> Path:
    """Take a policy-gradient step on each BATCH of samples and save the result in float32; return its directory.

    REINFORCE with the mean reward of all as baseline, which is what GRPO (arXiv 2402.03300) does within a group.

    Args:
        samples: (prompt, response, reward) of the epoch before.
        rate: AdamW's.
    """
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate, weight_decay=0.0)
    baseline = sum(reward for _, _, reward in samples) / len(samples)
    for at in range(0, len(samples), BATCH):
        part = samples[at : at + BATCH]
        longest = max(len(prompt) + len(ids) for prompt, ids, _ in part)
        tokens = torch.zeros(len(part), longest, dtype=torch.long)
        weights = torch.zeros(len(part), longest)
        for row, (prompt, ids, reward) in enumerate(part):
            tokens[row, : len(prompt) + len(ids)] = torch.tensor(prompt + ids)
            weights[row, len(prompt) : len(prompt) + len(ids)] = reward - baseline
        logprobs = model(input_ids=tokens).logits[:, :-1].log_softmax(-1)
        chosen = logprobs.gather(-1, tokens[:, 1:, None])[..., 0]
        _step(model, optimizer, -(chosen * weights[:, 1:]).sum() / weights.ne(0).sum().clamp(min=1), rate)
    model.save_pretrained(target)
    if (tokenizer := source / "tokenizer.json").is_file():
        shutil.copy(tokenizer, target)
    return target


def _step(model: Any, optimizer: Any, loss: Any, rate: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = rate
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
