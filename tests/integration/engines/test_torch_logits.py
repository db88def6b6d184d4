"""The engine's log-probabilities are those of Hugging Face."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from rlharvest.engine import Sampling

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


def reference(
    directory: Path, prompt: list[int], ids: list[int], temperature: float = 1.0, dtype: str = "float32"
) -> npt.NDArray[np.float64]:
    """Return what Hugging Face gives for each token of a response, shape (tokens,)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=getattr(torch, dtype))
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0].double() / temperature
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return np.asarray(logprobs[torch.arange(len(ids)), torch.tensor(ids)])


async def differences(
    directory: Path, drive: Any, make_request: Any, *, sampling: Sampling | None = None, **config: Any
) -> npt.NDArray[np.float64]:
    """Generate in a batch, with shared prompts, and return |Δ log-probability| of all tokens."""
    sampling = sampling or Sampling()
    found = []
    async with drive(directory, **config) as driver:
        requests = [make_request(handle, group=handle // 3, budget=80, sampling=sampling) for handle in range(9)]
        driver.submit(requests)
        await driver.finish(range(9))
    for request in requests:
        tokens = driver.got[request.handle]
        wanted = reference(
            directory, request.prompt.tolist(), tokens.ids, sampling.temperature or 1.0, config.get("dtype", "float32")
        )
        found.append(np.abs(wanted - np.array(tokens.logprobs)))
    return np.concatenate(found)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3"])
async def test_log_probabilities_match_hugging_face(
    kind: str, tied: bool, invariant: bool, make_model: Any, make_request: Any, drive: Any
) -> None:
    found = await differences(make_model(kind, tied=tied), drive, make_request, batch_invariant=invariant)
    assert found.mean() < 1e-5
    assert found.max() < 1e-4


@pytest.mark.parametrize(
    "config",
    [
        {"rope_parameters": LLAMA3},
        {"rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}},
        {"attention_bias": True, "mlp_bias": True},
        {"num_key_value_heads": 4},
        {"num_key_value_heads": 1, "head_dim": 32},
        {"vocab_size": 333, "hidden_size": 72, "intermediate_size": 50},
    ],
    ids=["llama3-rope", "linear-rope", "biases", "mha", "mqa", "odd-sizes"],
)
async def test_variants_of_llama_match_hugging_face(
    config: dict[str, Any], make_model: Any, make_request: Any, drive: Any
) -> None:
    found = await differences(make_model("llama", **config), drive, make_request)
    assert found.mean() < 1e-5
    assert found.max() < 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.5, 1.3])
async def test_log_probabilities_are_those_after_temperature(
    temperature: float, make_model: Any, make_request: Any, drive: Any
) -> None:
    sampling = Sampling(temperature=temperature)
    found = await differences(make_model(), drive, make_request, sampling=sampling)
    assert found.mean() < 1e-5


async def test_bfloat16_differs_from_hugging_face_by_its_rounding_alone(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    found = await differences(make_model("qwen3"), drive, make_request, dtype="bfloat16")
    assert found.mean() < 0.05


async def test_padding_of_the_head_is_never_sampled(make_model: Any, make_request: Any, drive: Any) -> None:
    """The head has rows beyond the tokenizer; training may push weight there."""
    sampling = Sampling(temperature=10.0, vocab=40)
    async with drive(make_model()) as driver:
        driver.submit([make_request(handle, budget=100, sampling=sampling) for handle in range(8)])
        await driver.finish(range(8))
    ids = {token for tokens in driver.got.values() for token in tokens.ids}
    assert max(ids) < 40
    assert len(ids) > 30
