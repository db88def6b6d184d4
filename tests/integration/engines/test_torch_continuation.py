"""A response that moves is the response that stayed: same ids, same log-probabilities, bit for bit."""

from __future__ import annotations

import random
from typing import Any

import pytest
from rlharvest.engine import Sampling
from rlharvest.spans import Finish, Run

RESPONSES = 5
BUDGET = 150
"""With its prompt a response runs over two borders of key blocks."""


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("llama", "float32"), ("qwen2", "float32"), ("qwen3", "bfloat16")],
)
async def test_100_random_cuts_give_the_uncut_response(
    kind: str, dtype: str, make_model: Any, make_request: Any, drive: Any
) -> None:
    """Temperature 1, other sequences joining and leaving the batch all the time."""
    directory = make_model(kind)
    async with drive(directory, dtype=dtype, slots=4) as uncut:
        uncut.submit([make_request(handle, budget=BUDGET) for handle in range(RESPONSES)])
        await uncut.finish(range(RESPONSES))
        assert uncut.engine.batch_invariant
    rng = random.Random(0)
    cuts = [(rng.randrange(RESPONSES), rng.randrange(BUDGET)) for _ in range(100)]
    requests = []
    for index, (response, cut) in enumerate(cuts):
        whole = make_request(response, budget=BUDGET)
        prefix = uncut.got[response].ids[:cut]
        requests.append(
            make_request(
                1000 + index,
                group=response,
                seed=whole.seed,
                budget=BUDGET,
                prefix=prefix,
            )
        )
        requests.append(make_request(2000 + index, group=rng.randrange(40), budget=rng.randrange(1, 30)))
    async with drive(directory, dtype=dtype, slots=21) as cut_up:
        cut_up.submit(requests)
        await cut_up.finish(request.handle for request in requests)
        assert cut_up.engine.numerics_key == uncut.engine.numerics_key
    for index, (response, cut) in enumerate(cuts):
        wanted, got = uncut.got[response], cut_up.got[1000 + index]
        assert got.ids == wanted.ids, f"response {response} cut at {cut}"
        assert got.logprobs[cut:] == wanted.logprobs[cut:], f"response {response} cut at {cut}"
        assert cut_up.finishes[1000 + index] is Finish.LENGTH


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_a_batch_of_1_gives_what_a_batch_of_32_gives(
    dtype: str, make_model: Any, make_request: Any, drive: Any
) -> None:
    results = []
    for slots in (1, 32):
        async with drive(make_model(), dtype=dtype, slots=slots) as driver:
            driver.submit([make_request(handle, group=handle // 8, budget=12) for handle in range(32)])
            await driver.finish(range(32))
            results.append((driver.got, driver.finishes))
    assert results[0] == results[1]


async def test_a_cut_is_exact_across_a_version_switch_with_recompute(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    first, second = make_model(seed=0), make_model(seed=1)
    async with drive(first) as stayed:
        stayed.submit([make_request(handle, budget=BUDGET) for handle in range(8)])
        await stayed.until(lambda: any(len(tokens.ids) > 20 for tokens in stayed.got.values()))
        await stayed.engine.load(second, 2)
        await stayed.finish(range(8))
    moved_at = {}
    async with drive(second) as moved:
        for handle in range(8):
            runs = stayed.got[handle].runs
            assert [run.version for run in runs] == [1, 2]
            moved_at[handle] = runs[0].n + handle
            prefix = stayed.got[handle].ids[: moved_at[handle]]
            moved.submit([make_request(handle, budget=BUDGET, prefix=prefix)])
        await moved.finish(range(8))
    for handle, cut in moved_at.items():
        assert moved.got[handle].ids == stayed.got[handle].ids
        assert moved.got[handle].logprobs[cut:] == stayed.got[handle].logprobs[cut:]


async def test_a_long_prefill_in_chunks_is_exact_too(make_model: Any, make_request: Any, drive: Any) -> None:
    """A continuation longer than one step may prefill, while others run."""
    context = 800
    async with drive(make_model(), context=context) as uncut:
        uncut.submit([make_request(0, budget=700)])
        await uncut.finish([0])
    async with drive(make_model(), context=context) as cut_up:
        others = [make_request(handle, budget=200) for handle in range(1, 6)]
        cut_up.submit([*others, make_request(0, budget=700, prefix=uncut.got[0].ids[:690])])
        await cut_up.finish(range(6))
    assert cut_up.got[0].ids == uncut.got[0].ids
    assert cut_up.got[0].logprobs[690:] == uncut.got[0].logprobs[690:]


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_the_fast_mode_continues_a_response_validly(
    kv: str, make_model: Any, make_request: Any, drive: Any
) -> None:
    """It promises the distribution, not the bits: offsets, lengths, versions and finishes are right."""
    async with drive(make_model(seed=0), batch_invariant=False, kv=kv) as driver:
        assert not driver.engine.batch_invariant
        driver.submit([make_request(handle, budget=60, prefix=range(1, 1 + handle)) for handle in range(20)])
        await driver.until(lambda: len(driver.got[0].ids) > 5)
        await driver.engine.load(make_model(seed=1), 2)
        await driver.finish(range(20))
    for handle in range(20):
        tokens = driver.got[handle]
        assert len(tokens.ids) == 60
        assert tokens.ids[:handle] == list(range(1, 1 + handle))
        assert sum(run.n for run in tokens.runs) == 60 - handle
        assert [run.version for run in tokens.runs] in ([1, 2], [2])
        assert driver.finishes[handle] is Finish.LENGTH


async def test_keep_goes_on_with_the_old_cache(make_model: Any, make_request: Any, drive: Any) -> None:
    """Nothing is prefilled again, and the next token has the new version."""
    async with drive(make_model(seed=0), kv="keep") as driver:
        driver.submit([make_request(0, budget=200)])
        await driver.until(lambda: len(driver.got[0].ids) > 5)
        await driver.engine.load(make_model(seed=1), 2)
        await driver.finish([0])
        assert driver.engine.stats().prefill_tokens == len(make_request(0).prompt)
    first, second = driver.got[0].runs
    assert first == Run(first.n, 1)
    assert second == Run(200 - first.n, 2)


async def test_greedy_repeats_whatever_the_seed(make_model: Any, make_request: Any, drive: Any) -> None:
    greedy = Sampling(temperature=0.0)
    async with drive(make_model()) as driver:
        driver.submit([make_request(handle, group=3, seed=handle, sampling=greedy) for handle in range(4)])
        await driver.finish(range(4))
    assert all(driver.got[handle] == driver.got[0] for handle in range(4))
