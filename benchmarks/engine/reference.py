"""Hugging Face: `generate` as a lane, and the forward pass of training as the judge of log-probabilities."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rlharvest_trainer.losses import token_logprobs
from torch import Tensor
from transformers.utils import logging

from benchmarks.engine.work import Made, Work, equal

logging.disable_progress_bar()
logging.set_verbosity_error()

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class Budgets(transformers.StoppingCriteria):  # type: ignore[misc]  # it has no annotations
    """Each row of a batch ends at a length of its own; the batch goes on until the last has."""

    def __init__(self, prompt: int, lengths: tuple[int, ...]) -> None:
        self._ends = torch.tensor([prompt + length for length in lengths])

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        return self._ends <= input_ids.shape[1]


class HuggingFace:
    """A model in both dtypes, its weights rounded to bfloat16 in either."""

    def __init__(self, model: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._models: dict[str, Any] = {
            name: transformers.AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
            for name, dtype in DTYPES.items()
        }

    def faster(self, batch: int) -> str:
        """Return the dtype whose steps are faster here: bfloat16 is slow on a processor without instructions for it."""
        work = equal(batch, 3, seed=0)
        return min(self._models, key=lambda dtype: self.generate(work, dtype).seconds)

    def generate(self, work: Work, dtype: str) -> Made:
        """Generate all of it, a batch after the other."""
        started = self._clock()
        for at in range(0, len(work.lengths), work.batch):
            prompts = torch.tensor(work.prompts[at : at + work.batch])
            lengths = work.lengths[at : at + work.batch]
            with torch.inference_mode():
                self._models[dtype].generate(
                    input_ids=prompts,
                    attention_mask=torch.ones_like(prompts),
                    generation_config=transformers.GenerationConfig(
                        do_sample=True,
                        temperature=work.temperature,
                        top_k=0,
                        max_new_tokens=max(lengths),
                        eos_token_id=None,
                        pad_token_id=0,
                    ),
                    stopping_criteria=transformers.StoppingCriteriaList([Budgets(prompts.shape[1], lengths)]),
                )
        return Made(tokens=work.tokens, seconds=self._clock() - started)

    def logprobs(self, work: Work, made: Made, dtype: str) -> Tensor:
        """Return what the trainer computes for each token of responses of one length, shape (tokens,)."""
        prompt = len(work.prompts[0])
        rows = torch.tensor([[*given, *ids] for given, ids in zip(work.prompts, made.ids, strict=True)])
        with torch.inference_mode():
            logits = self._models[dtype](input_ids=rows, use_cache=False).logits[:, prompt - 1 : -1]
            found, _ = token_logprobs(logits.flatten(0, 1), rows[:, prompt:].flatten(), temperature=work.temperature)
        return found
