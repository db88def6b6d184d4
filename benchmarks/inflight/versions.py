"""Two versions of a model, one training step or two apart, and Hugging Face's log-probabilities under each."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import transformers
from transformers.utils import logging

LEARNING_RATE = 1e-6
STEPS = 4
"""AdamW moves each weight by about the learning rate in each of its first steps."""

TEXT = (
    "A worker may vanish at any time. What it has sampled is in the log, and another one goes on from there. "
    "Every token carries the version of the weights that it was sampled with, so that the loss can correct for its age. "
    "A number is even if it can be divided by two without a remainder; the sum of two odd numbers is even. "
    "Water boils at a hundred degrees at sea level, and at less on a mountain, where the air is thinner. "
)

logging.disable_progress_bar()


def tokens(directory: Path, n: int, length: int) -> list[list[int]]:
    """Return so many prompts of this length, no two of them alike."""
    ids = list(transformers.AutoTokenizer.from_pretrained(directory)(TEXT, add_special_tokens=False)["input_ids"])
    ids = ids * (1 + (n + length) // len(ids))
    return [ids[start : start + length] for start in range(n)]


def two_versions(source: Path, directory: Path) -> tuple[Path, Path]:
    """Save a model in float32 before and after STEPS optimizer steps; return both directories."""
    paths = directory / "before", directory / "after"
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    _save(model, source, paths[0])
    batch = torch.tensor(tokens(source, 4, 64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    for _ in range(STEPS):
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    _save(model, source, paths[1])
    return paths


def _save(model: transformers.PreTrainedModel, source: Path, target: Path) -> None:
    model.save_pretrained(target)
    shutil.copy(source / "tokenizer.json", target)


class Reference:
    """Log-probabilities as the trainer computes them."""

    def __init__(self, directory: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)

    def logprobs(self, prompt: Sequence[int], ids: Sequence[int]) -> list[float]:
        """Return those of each token of a response at temperature 1."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([[*prompt, *ids]])).logits[0, len(prompt) - 1 : -1]
        rows = logits.double().log_softmax(-1)
        found: list[float] = rows.gather(-1, torch.tensor(ids)[:, None])[:, 0].tolist()
        return found
