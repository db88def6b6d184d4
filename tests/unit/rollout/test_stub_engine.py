"""The stub engine: the same tokens, whoever generates them and however often it is interrupted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.engine import EngineBroken, EngineConfig, Request, Sampling
from rlharvest.errors import DataError, InvalidField
from rlharvest.spans import Finish, Tokens
from rlharvest.testing.stub import StubEngine, StubOptions, stub_response, stub_tokens

SAMPLING = Sampling(eos_ids=frozenset({0}), vocab=50)
OPTIONS = StubOptions(vocab=50, eos_id=0, mean_length=20)
FAST = {"step_s": 0.002}


@given(
    prompt=st.lists(st.integers(0, 99), max_size=5),
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 40),
    cut=st.integers(0, 20),
    rest=st.integers(0, 20),
)
def test_tokens_depend_on_prompt_seed_and_position_only(prompt, seed, start, cut, rest):
    whole_ids, whole_logprobs = stub_tokens(prompt, seed, start, cut + rest, OPTIONS)
    ids, logprobs = stub_tokens(prompt, seed, start + cut, rest, OPTIONS)
    assert ids.tolist() == whole_ids[cut:].tolist()
    assert logprobs.tolist() == whole_logprobs[cut:].tolist()
    assert (whole_logprobs <= 0).all()
    assert (whole_ids < 50).all()


def test_lengths_come_from_the_seed_and_eos_ends_a_response_only():
    lengths = []
    for seed in range(200):
        ids, logprobs, finish = stub_response([1, 2], seed, 30, OPTIONS)
        lengths.append(len(ids))
        assert len(logprobs) == len(ids)
        assert (finish is Finish.EOS) == (ids[-1] == 0)
        assert 0 not in ids[:-1]
    assert max(lengths) == 30
    assert 12 < np.mean(lengths) < 24


def request(
    handle: int = 1, *, attempt: int = 1, prefix: list[int] | None = None, budget: int = 40, **fields
) -> Request:
    values = {"prompt": np.array([1, 2], np.uint32), "sampling": SAMPLING, "seed": handle, "group": 0, **fields}
    return Request(handle=handle, attempt=attempt, budget=budget, prefix=np.array(prefix or [], np.uint32), **values)


async def started(options: dict[str, object] | None = None, *, slots: int = 8) -> StubEngine:
    engine = StubEngine()
    await engine.start(EngineConfig(slots=slots, context=100, options={**FAST, **(options or {})}))
    await engine.load(Path("/nowhere"), 0)
    return engine


async def collect(engine: StubEngine, n: int) -> dict[int, tuple[Tokens, Finish]]:
    """Return the responses once n of them are finished."""
    found: dict[int, tuple[Tokens, Finish]] = {}
    async with asyncio.timeout(10):
        while sum(finish is not Finish.NONE for _, finish in found.values()) < n:
            for span in await engine.spans():
                tokens, finish = found.setdefault(span.handle, (Tokens(), Finish.NONE))
                assert finish is Finish.NONE
                tokens.extend(span)
                found[span.handle] = (tokens, span.finish)
    return found


async def test_more_requests_than_slots_all_end_as_the_pure_function_says():
    engine = await started({"mean_length": 15}, slots=2)
    engine.submit([request(handle) for handle in range(5)])
    found = await collect(engine, 5)
    options = StubOptions(mean_length=15).for_job(SAMPLING)
    for handle, (tokens, finish) in found.items():
        ids, logprobs, expected = stub_response([1, 2], handle, 40, options)
        assert tokens.ids == ids.tolist()
        assert tokens.logprobs == logprobs.tolist()
        assert finish is expected
    assert engine.stats().running == 0
    await engine.close()


async def test_versions_are_right_across_a_switch_and_a_bad_one_leaves_the_old():
    engine = await started({"bad_versions": [1]})
    engine.submit([request(budget=60)])
    await engine.spans()
    with pytest.raises(DataError):
        await engine.load(Path("/nowhere"), 1)
    assert engine.version == 0
    engine.pause()
    engine.resume()
    before = await engine.spans()
    await engine.load(Path("/nowhere"), 2)
    after = []
    while not after or after[-1].finish is Finish.NONE:
        after += await engine.spans()
    assert {run.version for span in before for run in span.runs} == {0}
    versions = [run.version for span in after for run in span.runs]
    assert versions == sorted(versions)
    assert versions[-1] == 2
    await engine.close()


async def test_a_paused_engine_generates_nothing():
    engine = await started()
    engine.submit([request()])
    await engine.spans()
    engine.pause()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            while True:
                await engine.spans()
    engine.resume()
    assert await engine.spans()
    await engine.close()


async def test_a_prefix_that_ends_the_response_yields_its_finish_and_no_token():
    engine = await started()
    engine.submit([request(1, prefix=[5, 0]), request(2, prefix=[5, 6], budget=2)])
    spans = await engine.spans()
    ends = {span.handle: (span.finish, len(span.ids), span.offset) for span in spans}
    assert ends == {1: (Finish.EOS, 0, 2), 2: (Finish.LENGTH, 0, 2)}
    await engine.close()


async def test_hanging_responses_stay_silent_and_a_crash_is_told():
    engine = await started({"hang_handles": [1], "hang_attempts": 1, "crash_token": 7})
    engine.submit([request(1), request(2, budget=3)])
    assert set(await collect(engine, 1)) == {2}
    engine.submit([request(1, attempt=2, budget=3)])
    assert set(await collect(engine, 1)) == {1}, "the second attempt does not hang"
    engine.submit([request(3, prompt=np.array([7], np.uint32))])
    with pytest.raises(EngineBroken):
        await engine.spans()
    await engine.close()


async def test_nothing_of_an_aborted_attempt_comes_after():
    engine = await started()
    engine.submit([request(1), request(2)])
    await engine.spans()
    await asyncio.sleep(0.02)
    engine.abort([(1, 1), (2, 9)])
    assert {span.handle for span in await engine.spans()} == {2}
    await engine.close()


async def test_unknown_options_are_refused_by_name():
    with pytest.raises(InvalidField, match=r"rollout\.stub\.speed"):
        await started({"speed": 2})
