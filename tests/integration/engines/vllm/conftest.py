"""One vLLM for a whole file: it takes half a minute to start, and a version is exchanged in milliseconds.

A file says what it is started with in its `CONFIG`.
"""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
import transformers
from rlharvest.engine import EngineConfig
from rlharvest_rollout.engines.restarting import RestartingEngine
from rlharvest_rollout.engines.vllm.engine import VllmEngine

PATIENCE_S = 120.0
HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the tests of this directory; skip them where vLLM is not installed, unless it is them that were asked for."""
    skipped = importlib.util.find_spec("vllm") is None and config.option.markexpr != "vllm"
    missing = pytest.mark.skip(reason="vLLM is not installed; `make test-vllm` makes an environment that has it")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # What vLLM and its hundred packages warn of is not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if skipped:
                item.add_marker(missing)


@dataclass
class Served:
    """What a worker has: an engine that starts again, and the vLLM engines that it was made of."""

    whole: RestartingEngine
    made: list[VllmEngine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(request: pytest.FixtureRequest, make_model: Any) -> AsyncIterator[Served]:
    """An engine that serves version 0."""
    config: EngineConfig = request.module.CONFIG
    made: list[VllmEngine] = []

    def make() -> VllmEngine:
        made.append(VllmEngine(threads=1, slots=config.slots, kv_memory_bytes=1 << 26))
        return made[-1]

    whole = RestartingEngine(make)
    try:
        await whole.start(config)
        await whole.load(make_model(head_dim=32, tied=True, seed=0), 0)
        yield Served(whole, made)
    finally:
        await whole.close()
        made.clear()
        gc.collect()  # here, where its warnings are not ours: vLLM leaves sockets to the collector


@pytest.fixture
def engine(served: Served) -> VllmEngine:
    """The vLLM engine that runs now."""
    return served.made[-1]


_versions = itertools.count(1)


@pytest.fixture
def serve(served: Served, make_model: Any, driver_of: Any) -> Callable[..., Awaitable[Any]]:
    """Load the model of a seed as a new version; return a driver."""

    async def serve(seed: int = 0) -> Any:
        await served.whole.load(make_model(head_dim=32, tied=True, seed=seed), next(_versions))
        return driver_of(served.whole, PATIENCE_S)

    return serve


def rows_of(directory: Path, prompt: list[int], ids: list[int], temperature: float = 1.0) -> torch.Tensor:
    """Return Hugging Face's log-probabilities after each token of a response, shape (tokens, vocab)."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + ids])).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1]


def differences_of(directory: Path, request: Any, tokens: Any, temperature: float = 1.0) -> np.ndarray:
    """Return how far the log-probabilities of a response are from Hugging Face's, for each token."""
    rows = rows_of(directory, request.prompt.tolist(), tokens.ids, temperature)
    wanted = rows[torch.arange(len(tokens.ids)), torch.tensor(tokens.ids)]
    return np.abs(np.asarray(wanted) - np.array(tokens.logprobs))


@pytest.fixture(scope="session")
def reference() -> Callable[..., torch.Tensor]:
    """See `rows_of`."""
    return rows_of


@pytest.fixture(scope="session")
def differences() -> Callable[..., np.ndarray]:
    """See `differences_of`."""
    return differences_of
