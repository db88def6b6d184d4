"""A lane of an engine that keeps `rlharvest.engine.Engine`: the torch engine here, vLLM's in its own environment."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rlharvest.engine import Engine, EngineConfig, Request, Sampling
from rlharvest.speculation.options import Speculation

from benchmarks.engine.work import Made, Work

SLOTS, CONTEXT = 32, 128


class EngineLane:
    """An engine with a model, its drafts off."""

    def __init__(self, engine: Engine, clock: Callable[[], float] = time.perf_counter) -> None:
        self._engine = engine
        self._clock = clock
        self._handles = 0

    async def open(
        self,
        model: Path,
        *,
        slots: int = SLOTS,
        dtype: Literal["float32", "bfloat16"] = "bfloat16",
        invariant: bool = False,
        options: dict[str, Any] | None = None,
    ) -> EngineLane:
        """Load a model; at most `slots` responses run at a time."""
        await self._engine.start(
            EngineConfig(
                slots=slots,
                context=CONTEXT,
                dtype=dtype,
                batch_invariant=invariant,
                speculation=Speculation(enabled="off"),
                options=options or {},
            )
        )
        await self._engine.load(model, 1)
        return self

    async def generate(self, work: Work) -> Made:
        """Generate all of it."""
        first, self._handles = self._handles, self._handles + len(work.lengths)
        requests = [
            Request(
                handle=first + index,
                attempt=1,
                group=first + index,
                seed=work.seed * 1_000_003 + index,
                prompt=np.array(prompt, np.uint32),
                prefix=np.array([], np.uint32),
                budget=length,
                sampling=Sampling(temperature=work.temperature),
            )
            for index, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        ids: list[list[int]] = [[] for _ in requests]
        logprobs: list[list[float]] = [[] for _ in requests]
        started, left = self._clock(), len(requests)
        self._engine.submit(requests)
        while left:
            for span in await self._engine.spans():
                ids[span.handle - first] += span.ids.tolist()
                logprobs[span.handle - first] += span.logprobs.tolist()
                left -= bool(span.finish)
        seconds = self._clock() - started
        return Made(
            tokens=sum(map(len, ids)),
            seconds=seconds,
            ids=tuple(map(tuple, ids)),
            logprobs=tuple(map(tuple, logprobs)),
        )

    async def close(self) -> None:
        """Stop the engine."""
        await self._engine.close()
