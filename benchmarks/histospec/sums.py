"""SmolLM2-135M-Instruct, as it is, asked for sums: a policy of much entropy, whose steps are bound by reading its weights.

Responses are short and few, so that a whole run takes about ten minutes on one quiet core.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import transformers

from benchmarks.histospec.task import Task

PROMPTS = 160


def sums(directory: Path) -> Task:
    """Return the task for a model in a Hugging Face directory."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    def prompt_of(number: int) -> list[int]:
        chat = [{"role": "user", "content": f"How many are {_left(number)} and {_right(number)}? Give the sum."}]
        text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    def reward_of(number: int, ids: Sequence[int]) -> float:
        return float(str(_left(number) + _right(number)) in tokenizer.decode(ids))

    return Task(
        prompts={number: prompt_of(number) for number in range(PROMPTS)},
        reward=reward_of,
        eos=int(tokenizer.eos_token_id),
        vocab=len(tokenizer),
        length=24,
        samples=2,
        batches={1: 1, 4: 2, 32: 16},
        warm_up=80,
        learning_rate=1e-6,
        trained=32,
    )


def _left(number: int) -> int:
    return 2 + 37 * number % 97


def _right(number: int) -> int:
    return 1 + 53 * number % 89
