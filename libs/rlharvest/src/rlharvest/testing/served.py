"""A job on the stub engine that does nothing but serve, and what its completions are when nothing interrupts them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlharvest.noise import response_seed
from rlharvest.spans import Finish
from rlharvest.testing.model import CHAT, CHATML, EOS, tiny_model
from rlharvest.testing.stub import parse_options, stub_length, stub_response
from rlharvest.testing.system import System

VOCAB = CHAT.vocab
CONTEXT = 8192
_TEXTS = {index: "" if token in CHAT.specials else token for token, index in VOCAB.items()}


@dataclass(frozen=True, slots=True)
class Expected:
    """A choice that nothing interrupted."""

    ids: list[int]
    logprobs: list[float]
    text: str
    reason: str


def serving_spec(system: System, **changes: Any) -> dict[str, Any]:
    """Return a job whose one group of training gets a token from each worker and no more: it runs until it is cancelled."""
    model = system.directory / "chat-model"
    if not model.exists():
        tiny_model(model, words=CHAT, template=CHATML, context=CONTEXT)
    stub = {"step_s": 0.005, "mean_length": 2000, "hang_handles": [0, 1], "hang_after": 1} | changes.pop("stub", {})
    return system.spec(
        model=str(model),
        sampling={"num_generations": 2, "max_completion_length": 64},
        algorithm={"prompts_per_step": 1},
        rollout={"engine": "stub", "stub": stub, "progress_deadline_s": 3600},
        **changes,
    )


def encode(text: str) -> list[int]:
    """Return the token ids of a text: one a character."""
    return [VOCAB[character] for character in text]


def expected(spec: dict[str, Any], prompt: Sequence[int], *, seed: int, budget: int, place: int = 0) -> Expected:
    """Return the choice at a place of a group."""
    options = parse_options(spec["rollout"]["stub"]).model_copy(update={"vocab": len(VOCAB), "eos_id": VOCAB[EOS]})
    ids, logprobs, finish = stub_response(list(prompt), response_seed(seed, 0, 0, place), budget, options)
    text = "".join(_TEXTS[id] for id in ids.tolist())
    return Expected(ids.tolist(), logprobs.tolist(), text, "length" if finish is Finish.LENGTH else "stop")


def seed_for(spec: dict[str, Any], prompt: Sequence[int], *, least: int, most: int, n: int = 1, after: int = 0) -> int:
    """Return the first seed from `after` on whose choices, at all `n` places, end by themselves within these bounds."""
    options = parse_options(spec["rollout"]["stub"])
    for seed in range(after, 10**9):
        lengths = (stub_length(list(prompt), response_seed(seed, 0, 0, place), options) for place in range(n))
        if all(length is not None and least <= length <= most for length in lengths):
            return seed
    raise AssertionError("no seed has such lengths")
