"""An engine that goes through prompts, with or without drafts, and how fast it was."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rlharvest.engine import EngineConfig, EngineStats, Request, Sampling
from rlharvest.speculation.history import DraftSource
from rlharvest.speculation.options import Enabled, Speculation
from rlharvest_rollout.engines.torch.engine import TorchEngine


@dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """What is asked of an engine."""

    prompts: Mapping[int, list[int]]
    """By their numbers."""
    samples: int
    """Responses to each prompt."""
    budget: int
    sampling: Sampling
    seed: int
    """Another one gives other responses."""
    history: Mapping[int, DraftSource]
    """Of earlier epochs, by the number of the prompt; {}: none."""

    def requests(self, numbers: Iterable[int], copy: int) -> list[Request]:
        """Return the requests for some of the prompts; `copy` makes other handles for the same responses."""
        return [
            Request(
                handle=(copy * 1000 + number) * self.samples + place,
                attempt=1,
                group=number,
                seed=self.seed * 1_000_003 + number * self.samples + place,
                prompt=np.array(self.prompts[number], np.uint32),
                prefix=np.array([], np.uint32),
                budget=self.budget,
                sampling=self.sampling,
                drafts=self.history.get(number),
            )
            for number in numbers
            for place in range(self.samples)
        ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of some prompts."""

    responses: dict[int, list[list[int]]]
    """For each prompt its samples' ids."""
    tokens: int
    seconds: float
    drafts: int
    drafted: int
    accepted: int

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.tokens / self.seconds

    @property
    def acceptance(self) -> float:
        """Share of the drafted tokens that were accepted; 0 if none were drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0

    @property
    def window(self) -> float:
        """Mean length of a draft."""
        return self.drafted / self.drafts if self.drafts else 0.0


class Lane:
    """An engine of one thread with a model; what drafts are good for is learned as it goes."""

    def __init__(self, epoch: Epoch, clock: Callable[[], float]) -> None:
        self._epoch = epoch
        self._clock = clock
        self._copy = 0
        self._engine: TorchEngine | None = None

    async def open(self, directory: Path, *, batch: int, drafts: Enabled, invariant: bool = False) -> Lane:
        """Load the model; at most `batch` responses run at a time."""
        epoch = self._epoch
        self._engine = TorchEngine(threads=1, slots=batch, kv_memory_bytes=1 << 29, device="cpu")
        config = EngineConfig(
            slots=batch,
            context=max(map(len, epoch.prompts.values())) + epoch.budget,
            batch_invariant=invariant,
            speculation=Speculation(enabled=drafts),
            options={},
        )
        await self._engine.start(config)
        await self._engine.load(directory, 1)
        return self

    async def generate(self, numbers: Iterable[int]) -> Result:
        """Generate all responses to some of the prompts."""
        assert self._engine is not None
        numbers = list(numbers)
        requests = self._epoch.requests(numbers, self._copy)
        self._copy += 1
        got: dict[int, list[int]] = {request.handle: [] for request in requests}
        before = self._engine.stats()
        started = self._clock()
        self._engine.submit(requests)
        left = len(requests)
        while left:
            for span in await self._engine.spans():
                got[span.handle] += span.ids.tolist()
                left -= bool(span.finish)
        seconds = self._clock() - started
        ids = iter(got.values())
        responses = {number: [next(ids) for _ in range(self._epoch.samples)] for number in numbers}
        return _result(responses, seconds, before, self._engine.stats())

    async def close(self) -> None:
        """Stop the engine."""
        if self._engine is not None:
            await self._engine.close()


def _result(responses: dict[int, list[list[int]]], seconds: float, before: EngineStats, after: EngineStats) -> Result:
    return Result(
        responses=responses,
        tokens=after.generated_tokens - before.generated_tokens,
        seconds=seconds,
        drafts=after.drafts - before.drafts,
        drafted=after.drafted_tokens - before.drafted_tokens,
        accepted=after.accepted_tokens - before.accepted_tokens,
    )
