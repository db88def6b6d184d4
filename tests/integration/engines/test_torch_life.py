"""Requests and versions come and go while the engine runs."""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rlharvest.engine import Engine, EngineBroken, EngineConfig, Sampling
from rlharvest.errors import Conflict, CorruptData, DataError, InvalidField
from rlharvest.spans import Finish
from rlharvest_rollout.engines.torch import runner
from rlharvest_rollout.engines.torch.engine import TorchEngine
from safetensors.torch import load_file, save_file


async def test_the_prompt_of_a_group_is_prefilled_once(make_model: Any, make_request: Any, drive: Any) -> None:
    async with drive(make_model()) as driver:
        driver.submit([make_request(handle, group=7, budget=5) for handle in range(8)])
        await driver.finish(range(8))
        stats = driver.engine.stats()
    prompt = len(make_request(0, group=7).prompt)
    assert (stats.prefill_tokens, stats.prefill_saved_tokens) == (prompt, 7 * prompt)
    assert stats.generated_tokens == 40
    assert (stats.running, stats.waiting) == (0, 0)
    assert len({tuple(tokens.ids) for tokens in driver.got.values()}) > 1


async def test_the_prompt_is_prefilled_again_under_another_version(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    async with drive(make_model(seed=0)) as driver:
        driver.submit([make_request(0, group=7, budget=5)])
        await driver.finish([0])
        await driver.engine.load(make_model(seed=1), 2)
        driver.submit([make_request(1, group=7, budget=5)])
        await driver.finish([1])
        assert driver.engine.stats().prefill_saved_tokens == 0
    assert [run.version for run in driver.got[1].runs] == [2]


async def test_a_response_ends_at_eos_stop_string_or_budget(make_model: Any, make_request: Any, drive: Any) -> None:
    async with drive(make_model()) as driver:
        driver.submit([make_request(0, budget=60)])
        await driver.finish([0])
        ids = driver.got[0].ids
        at = next(index for index in range(20, 60) if ids[index] not in ids[:index])
        letter = chr(97 + ids[at] % 26) + (str(ids[at] // 26) if ids[at] >= 26 else "")
        before = chr(97 + ids[at - 1] % 26) + (str(ids[at - 1] // 26) if ids[at - 1] >= 26 else "")
        eos, stop = Sampling(eos_ids=frozenset({ids[at]})), Sampling(stop=(before + letter,))
        same = {"group": 0, "seed": make_request(0).seed, "budget": 60}
        driver.submit(
            [
                make_request(1, sampling=eos, **same),
                make_request(2, sampling=stop, **same),
                make_request(3, sampling=stop, prefix=ids[: at - 3], **same),
                make_request(4, **{**same, "budget": 7}),
            ]
        )
        await driver.finish([1, 2, 3, 4])
    assert driver.finishes == {
        0: Finish.LENGTH,
        1: Finish.EOS,
        2: Finish.STOP,
        3: Finish.STOP,
        4: Finish.LENGTH,
    }
    assert driver.got[1].ids == driver.got[2].ids == driver.got[3].ids == ids[: at + 1]
    assert driver.got[4].ids == ids[:7]


async def test_a_prefix_that_has_ended_yields_its_finish_and_no_token(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    async with drive(make_model()) as driver:
        driver.submit(
            [
                make_request(0, prefix=[1, 2, 3], budget=3),
                make_request(1, prefix=[1, 9], sampling=Sampling(eos_ids=frozenset({9}))),
                make_request(2, prefix=[1, 2], sampling=Sampling(stop=("bc",))),
            ]
        )
        await driver.finish(range(3))
        assert driver.engine.stats().generated_tokens == 0
    assert [driver.finishes[handle] for handle in range(3)] == [Finish.LENGTH, Finish.EOS, Finish.STOP]
    assert [len(driver.got[handle].ids) for handle in range(3)] == [3, 2, 2]


async def test_requests_wait_while_the_cache_is_full(make_model: Any, make_request: Any, drive: Any) -> None:
    slot_bytes = 2 * 2 * 2 * 256 * 16 * 4
    async with drive(make_model(), kv_memory_bytes=4 * slot_bytes) as driver:
        driver.submit([make_request(handle, budget=30) for handle in range(9)])
        await driver.take()
        stats = driver.engine.stats()
        assert stats.running <= 2
        assert stats.running + stats.waiting + len(driver.finishes) == 9
        await driver.finish(range(9))


async def test_a_cache_too_small_for_one_sequence_is_refused(make_model: Any, drive: Any) -> None:
    with pytest.raises(InvalidField, match=r"kv_memory_bytes.*Give at least"):
        async with drive(make_model(), kv_memory_bytes=1000):
            pass


async def test_an_abort_leaves_nothing(make_model: Any, make_request: Any, drive: Any) -> None:
    """Running, waiting and unknown ones: no span comes after, and the others go on as if alone."""
    async with drive(make_model(), slots=4) as driver:
        driver.submit([make_request(handle, budget=60) for handle in range(8)])
        await driver.take()
        driver.engine.abort([(0, 1), (2, 1), (6, 1), (7, 9), (99, 1)])
        alive = [1, 3, 4, 5, 7]
        while not set(alive) <= set(driver.finishes):
            assert {span.handle for span in await driver.take()} <= set(alive)
        stats = driver.engine.stats()
        assert (stats.running, stats.waiting) == (0, 0)
    async with drive(make_model()) as alone:
        alone.submit([make_request(3, budget=60)])
        await alone.finish([3])
    assert alone.got[3] == driver.got[3]


async def test_a_newer_attempt_replaces_the_older_one(make_model: Any, make_request: Any, drive: Any) -> None:
    async with drive(make_model()) as driver:
        driver.submit([make_request(0, budget=100)])
        await driver.take()
        driver.engine.submit([make_request(0, budget=100)])
        driver.submit([make_request(0, attempt=2, budget=100, prefix=[5, 6])])
        driver.engine.submit([make_request(0, attempt=1, budget=100)])
        while 0 not in driver.finishes:
            assert {span.attempt for span in await driver.take()} == {2}
    assert driver.got[0].ids[:2] == [5, 6]
    assert len(driver.got[0].ids) == 100


async def test_a_failed_load_leaves_the_old_version_serving(
    make_model: Any, make_request: Any, drive: Any, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(make_model(seed=1), broken)
    whole = (broken / "model.safetensors").read_bytes()
    async with drive(make_model(seed=0)) as driver:
        driver.submit([make_request(0, budget=200)])
        await driver.take()
        for length in (0, 5, 300, len(whole) - 1):
            (broken / "model.safetensors").write_bytes(whole[:length])
            with pytest.raises(CorruptData, match=r"model\.safetensors"):
                await driver.engine.load(broken, 2)
        with pytest.raises(DataError):
            await driver.engine.load(tmp_path / "nothing", 2)
        assert driver.engine.version == 1
        await driver.finish([0])
    async with drive(make_model(seed=0)) as alone:
        alone.submit([make_request(0, budget=200)])
        await alone.finish([0])
    assert alone.got[0] == driver.got[0]


async def test_a_load_of_the_serving_version_does_nothing(make_model: Any, drive: Any, tmp_path: Path) -> None:
    async with drive(make_model()) as driver:
        await driver.engine.load(tmp_path / "not even there", 1)


async def test_weights_that_give_no_numbers_break_the_engine(
    make_model: Any, make_request: Any, drive: Any, tmp_path: Path
) -> None:
    """Finite weights whose products overflow: nothing that was sampled from garbage comes out."""
    huge = tmp_path / "huge"
    shutil.copytree(make_model(), huge)
    tensors = load_file(huge / "model.safetensors")
    tensors["model.norm.weight"].fill_(3e38)
    save_file(tensors, huge / "model.safetensors")
    async with drive(huge) as driver:
        driver.submit([make_request(0)])
        with pytest.raises(EngineBroken, match="NotFinite"):
            await driver.take()
        with pytest.raises(EngineBroken):
            driver.engine.submit([make_request(1)])
        with pytest.raises(EngineBroken):
            await driver.engine.load(make_model(), 2)


async def test_a_load_that_waits_learns_that_the_thread_died(
    make_model: Any, make_request: Any, drive: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*_: Any, **__: Any) -> None:
        raise MemoryError

    async with drive(make_model()) as driver:
        monkeypatch.setattr(runner, "sample", die)
        driver.engine.submit([make_request(0)])
        with pytest.raises(EngineBroken, match="MemoryError"):
            await driver.engine.load(make_model(seed=1), 2)


async def test_nothing_is_generated_while_paused(make_model: Any, make_request: Any, drive: Any) -> None:
    async with drive(make_model()) as driver:
        driver.engine.pause()
        driver.submit([make_request(0, budget=20)])
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await driver.engine.spans()
        await driver.engine.load(make_model(seed=1), 2)
        driver.engine.resume()
        await driver.finish([0])
    assert [run.version for run in driver.got[0].runs] == [2]


async def test_the_event_loop_goes_on_while_the_engine_computes(make_model: Any, make_request: Any, drive: Any) -> None:
    async with drive(make_model(), slots=32) as driver:
        driver.submit([make_request(handle, budget=200) for handle in range(32)])
        beats = 0
        while 0 not in driver.finishes:
            await driver.take()
            await asyncio.sleep(0)
            beats += 1
        assert beats > 20


async def test_a_request_that_does_not_fit_is_refused_and_none_with_it_is_taken(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    async with drive(make_model()) as driver:
        for bad in (
            {"budget": 256},
            {"prompt": np.array([], dtype=np.uint32)},
            {"prefix": [300]},
        ):
            with pytest.raises(InvalidField):
                driver.engine.submit([make_request(1), make_request(0, **bad)])
        assert driver.engine.stats().waiting == 0
        driver.submit([make_request(1, budget=4)])
        await driver.finish([1])


async def test_stop_strings_without_a_tokenizer_are_refused(
    make_model: Any, make_request: Any, drive: Any, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(make_model(), bare)
    (bare / "tokenizer.json").unlink()
    async with drive(bare) as driver:
        with pytest.raises(InvalidField, match=r"sampling\.stop.*tokenizer\.json"):
            driver.engine.submit([make_request(0, sampling=Sampling(stop=("x",)))])


async def test_the_life_of_an_engine(make_model: Any, make_request: Any) -> None:
    """Start, no version; a second job starts empty and may have another shape; close twice."""
    engine = TorchEngine(threads=1, slots=4, kv_memory_bytes=1 << 26, device="cpu")
    served: Engine = engine
    config = EngineConfig(slots=4, context=128, options={})
    await served.start(config)
    assert served.version is None
    with pytest.raises(Conflict):
        served.submit([make_request(0)])
    await served.load(make_model(), 0)
    served.submit([make_request(0, budget=100)])
    await served.spans()
    await served.start(config)
    assert served.version is None
    await served.load(make_model("qwen3", num_hidden_layers=3), 0)
    assert served.stats().generated_tokens == 0
    served.submit([make_request(5, budget=3)])
    assert {span.handle for span in await served.spans()} == {5}
    await served.close()
    await served.close()
    with pytest.raises(EngineBroken):
        while True:
            await served.spans()
    assert torch.get_num_threads() == 1
