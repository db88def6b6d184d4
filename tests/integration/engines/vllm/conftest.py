"""One vLLM for a whole file: it takes half a minute to start, and a version is exchanged in milliseconds."""

from __future__ import annotations

import gc
import importlib.util
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from rlharvest.engine import EngineConfig
from rlharvest_rollout.engines.restarting import RestartingEngine
from rlharvest_rollout.engines.vllm.engine import VllmEngine

CONTEXT = 256
PATIENCE_S = 120.0
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this directory, and skip them where vLLM is not installed."""
    missing = pytest.mark.skip(reason="vLLM is not installed; `make test-vllm` makes an environment that has it")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)
            # What vLLM and its hundred packages warn of is not ours to mend.
            item.add_marker(pytest.mark.filterwarnings("ignore"))
            if importlib.util.find_spec("vllm") is None:
                item.add_marker(missing)


@dataclass
class Served:
    """What a worker has: an engine that starts again, and the vLLM engines that it was made of."""

    whole: RestartingEngine
    made: list[VllmEngine]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(make_model: Any) -> AsyncIterator[Served]:
    """An engine that serves version 0."""
    made: list[VllmEngine] = []

    def make() -> VllmEngine:
        made.append(VllmEngine(threads=1, slots=16, kv_memory_bytes=1 << 26))
        return made[-1]

    whole = RestartingEngine(make)
    try:
        await whole.start(EngineConfig(slots=16, context=CONTEXT, options={}))
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
