"""An engine that breaks goes on with its responses; nobody who uses it sees more than a pause."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rlharvest.engine import EngineBroken, EngineConfig, Request, Sampling
from rlharvest.errors import DataError, Unavailable
from rlharvest.spans import Finish
from rlharvest.testing.stub import StubEngine
from rlharvest_rollout.engines.restarting import MOST, WITHIN_S, RestartingEngine

CONFIG = EngineConfig(slots=8, context=512, options={"step_s": 0.002, "vocab": 50})


class Breaking(StubEngine):
    """A stub that breaks when it is told to."""

    def break_now(self) -> None:
        self._break(EngineBroken("told to"))


class BreaksOnLoad(Breaking):
    async def load(self, directory: Path, version: int) -> None:
        if version == 2:
            self.break_now()
            raise EngineBroken("told to")
        await super().load(directory, version)


class Refuses(Breaking):
    async def load(self, directory: Path, version: int) -> None:
        raise DataError("gone")


def request(handle: int, **changes: object) -> Request:
    values = {
        "handle": handle,
        "attempt": 1,
        "group": 0,
        "seed": handle,
        "prompt": np.array([1, 2, 3], np.uint32),
        "prefix": np.array([], np.uint32),
        "budget": 120,
        "sampling": Sampling(vocab=50),
    }
    return Request(**{**values, **changes})  # type: ignore[arg-type]  # a test's shorthand


def restarting(
    *kinds: type[Breaking], clock: Callable[[], float] = lambda: 0.0
) -> tuple[RestartingEngine, list[Breaking]]:
    made: list[Breaking] = []

    def make() -> Breaking:
        made.append((kinds[len(made)] if len(made) < len(kinds) else Breaking)())
        return made[-1]

    return RestartingEngine(make, clock=clock), made


async def collect(
    engine: RestartingEngine, handles: set[int], on_tokens: Callable[[int], None]
) -> dict[int, list[int]]:
    got: dict[int, list[int]] = {handle: [] for handle in handles}
    done: set[int] = set()
    while done < handles:
        async with asyncio.timeout(30):
            for span in await engine.spans():
                assert span.offset == len(got[span.handle])
                got[span.handle].extend(span.ids.tolist())
                if span.finish is not Finish.NONE:
                    done.add(span.handle)
        on_tokens(sum(map(len, got.values())))
    return got


async def test_responses_go_on_where_they_were(tmp_path: Path) -> None:
    engine, made = restarting()
    await engine.start(CONFIG)
    await engine.load(tmp_path, 7)
    engine.submit([request(handle) for handle in range(4)])
    breaks = iter([100, 250])
    due = next(breaks)

    def break_sometimes(tokens: int) -> None:
        nonlocal due
        if tokens > due:
            made[-1].break_now()
            due = next(breaks, 10**9)

    got = await collect(engine, set(range(4)), break_sometimes)
    assert len(made) == 3
    assert engine.version == 7
    await engine.close()
    calm, _ = restarting()
    await calm.start(CONFIG)
    await calm.load(tmp_path, 7)
    calm.submit([request(handle) for handle in range(4)])
    assert await collect(calm, set(range(4)), lambda _: None) == got
    await calm.close()


async def test_what_was_aborted_does_not_come_back(tmp_path: Path) -> None:
    engine, made = restarting()
    await engine.start(CONFIG)
    await engine.load(tmp_path, 0)
    engine.submit([request(0), request(1)])
    engine.abort([(0, 1)])
    made[-1].break_now()
    engine.submit([request(2, budget=5)])  # while it is broken
    assert set(await collect(engine, {1, 2}, lambda _: None)) == {1, 2}
    await engine.close()


async def test_a_pause_outlives_a_restart(tmp_path: Path) -> None:
    engine, made = restarting()
    await engine.start(CONFIG)
    await engine.load(tmp_path, 0)
    engine.submit([request(0, budget=5)])
    engine.pause()
    made[-1].break_now()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3):
            await engine.spans()
    engine.resume()
    await collect(engine, {0}, lambda _: None)
    await engine.close()


async def test_a_load_that_breaks_it_leaves_the_version_before(tmp_path: Path) -> None:
    engine, _ = restarting(BreaksOnLoad)
    await engine.start(CONFIG)
    await engine.load(tmp_path, 1)
    engine.submit([request(0, budget=30)])
    with pytest.raises(Unavailable, match="version 2"):
        await engine.load(tmp_path, 2)
    assert engine.version == 1
    await collect(engine, {0}, lambda _: None)
    await engine.close()


async def test_one_that_breaks_again_and_again_is_given_up(tmp_path: Path) -> None:
    now = 0.0
    engine, made = restarting(clock=lambda: now)
    await engine.start(CONFIG)
    await engine.load(tmp_path, 0)
    engine.submit([request(0, budget=400)])
    for _ in range(MOST):
        made[-1].break_now()
        await engine.spans()
    now = WITHIN_S + 1.0
    made[-1].break_now()
    await engine.spans()
    for _ in range(MOST - 1):
        made[-1].break_now()
        await engine.spans()
    made[-1].break_now()
    with pytest.raises(EngineBroken, match="told to"):
        while True:
            await engine.spans()
    await engine.close()


async def test_one_that_cannot_start_again_says_both_reasons(tmp_path: Path) -> None:
    engine, made = restarting(Breaking, Refuses)
    await engine.start(CONFIG)
    await engine.load(tmp_path, 0)
    made[-1].break_now()
    with pytest.raises(EngineBroken, match=r"told to.*gone"):
        await engine.spans()
    await engine.close()
