"""vLLM keeps the promises of an engine: what it samples, what it labels it with, and what a version does to it."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from rlharvest.engine import EngineBroken, EngineConfig, Sampling
from rlharvest.errors import CorruptData, DataError, InvalidField
from rlharvest.spans import Finish
from rlharvest.speculation.options import Speculation
from rlharvest_rollout.engines.vllm import engine as module
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

CONFIG = EngineConfig(slots=16, context=256, speculation=Speculation(enabled="off"), options={})
GREEDY = Sampling(temperature=0.0)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
async def test_log_probabilities_match_hugging_face(
    temperature: float, serve: Any, make_model: Any, make_request: Any, differences: Any
) -> None:
    driver = await serve(0)
    sampling = Sampling(temperature=temperature)
    requests = [make_request(handle, group=handle // 3, budget=60, sampling=sampling) for handle in range(9)]
    driver.submit(requests)
    await driver.finish(range(9))
    directory = make_model(head_dim=32, tied=True, seed=0)
    found = [differences(directory, one, driver.got[one.handle], temperature or 1.0) for one in requests]
    assert np.concatenate(found).mean() < 1e-4
    if temperature:
        assert len({tuple(tokens.ids) for tokens in driver.got.values()}) == 9


async def test_a_greedy_continuation_is_the_uncut_response(
    serve: Any, make_model: Any, make_request: Any, reference: Any
) -> None:
    """100 random cuts; equal up to the first position where two tokens are equally likely but for rounding."""
    driver, rng = await serve(0), random.Random(0)
    driver.submit([make_request(handle, budget=60, sampling=GREEDY) for handle in range(5)])
    await driver.finish(range(5))
    cuts = {100 + index: (rng.randrange(5), rng.randrange(60)) for index in range(100)}
    driver.submit(
        make_request(handle, group=response, budget=60, sampling=GREEDY, prefix=driver.got[response].ids[:cut])
        for handle, (response, cut) in cuts.items()
    )
    await driver.finish(cuts)
    directory = make_model(head_dim=32, tied=True, seed=0)
    unequal = 0
    for handle, (response, cut) in cuts.items():
        wanted, got = driver.got[response].ids, driver.got[handle].ids
        if wanted == got:
            continue
        unequal += 1
        at = next(place for place in range(60) if wanted[place] != got[place])
        rows = reference(directory, make_request(response).prompt.tolist(), wanted)
        top = rows[at].topk(2).values
        assert float(top[0] - top[1]) < 1e-3, f"response {response} cut at {cut} differs at {at}"
    assert unequal < 50


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_a_version_is_switched_under_running_responses(
    kv: str,
    engine: Any,
    serve: Any,
    make_model: Any,
    make_request: Any,
    monkeypatch: pytest.MonkeyPatch,
    differences: Any,
) -> None:
    """None is lost, each token is of the version that it names, and new ones are those of a fresh engine."""
    driver = await serve(0)
    old, new = make_model(head_dim=32, tied=True, seed=0), make_model(head_dim=32, tied=True, seed=1)
    monkeypatch.setattr(engine, "_config", replace(engine._config, kv=kv))
    before = engine.version
    requests = [make_request(handle, group=handle // 2, budget=200) for handle in range(8)]
    driver.submit(requests)
    await driver.until(lambda: min(len(driver.got[handle].ids) for handle in range(8)) > 20)
    await serve(1)
    after = engine.version
    requests.append(make_request(8, group=0, budget=20))
    driver.submit(requests[8:])
    await driver.finish(range(9))
    assert [run.version for run in driver.got[8].runs] == [after]
    assert differences(new, requests[8], driver.got[8])[0] < 1e-3
    for request in requests[:8]:
        tokens = driver.got[request.handle]
        assert len(tokens.ids) == 200
        assert [run.version for run in tokens.runs] == [before, after]
        cut = tokens.runs[0].n
        assert differences(old, request, tokens)[:cut].max() < 1e-3
        if kv == "recompute":
            assert differences(new, request, tokens)[cut:].max() < 1e-3


async def test_a_failed_load_leaves_the_old_version_serving(
    engine: Any,
    serve: Any,
    make_model: Any,
    make_request: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    differences: Any,
) -> None:
    """Found before vLLM sees it, and found by vLLM in the middle of a load."""
    driver = await serve(0)
    broken = tmp_path / "broken"
    shutil.copytree(make_model(head_dim=32, tied=True, seed=1), broken)
    weights, version = broken / "model.safetensors", engine.version
    whole = weights.read_bytes()
    request = make_request(0, budget=200)
    driver.submit([request])
    await driver.take()
    for length in (0, 5, 300, len(whole) - 1):
        weights.write_bytes(whole[:length])
        with pytest.raises(CorruptData, match=r"model\.safetensors"):
            await driver.engine.load(broken, 900)
    weights.write_bytes(whole)
    tensors = load_file(weights)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] * float("nan")}, weights)
    with pytest.raises(InvalidField, match=r"model\.norm\.weight.*not finite"):
        await engine.load(broken, 901)
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1" not in name}, weights)
    with pytest.raises(InvalidField, match=r"layers\.1.*missing"):
        await engine.load(broken, 902)
    with pytest.raises(DataError):
        await engine.load(tmp_path / "nothing", 903)
    weights.write_bytes(whole[:-1])
    monkeypatch.setattr(module, "read_layout", lambda _: engine._layout)
    with pytest.raises(DataError, match="the one before is back"):
        await engine.load(broken, 904)
    assert engine.version == version
    await driver.finish([0])
    assert [run.version for run in driver.got[0].runs] == [version]
    assert differences(make_model(head_dim=32, tied=True, seed=0), request, driver.got[0]).max() < 1e-3


async def test_a_response_ends_at_eos_stop_string_or_budget(serve: Any, make_request: Any) -> None:
    driver = await serve(0)
    driver.submit([make_request(0, budget=60, sampling=GREEDY)])
    await driver.finish([0])
    ids = driver.got[0].ids
    at = next(index for index in range(3, 60) if ids[index] not in ids[:index])
    names = [chr(97 + id_ % 26) + (str(id_ // 26) if id_ >= 26 else "") for id_ in ids]
    eos = replace(GREEDY, eos_ids=frozenset({ids[at]}))
    stop = replace(GREEDY, stop=(names[at - 1] + names[at],))
    same = {"group": 0, "budget": 60}
    driver.submit(
        [
            make_request(1, sampling=eos, **same),
            make_request(2, sampling=stop, **same),
            make_request(3, sampling=stop, prefix=ids[: at - 2], **same),
            make_request(4, sampling=GREEDY, **{**same, "budget": 7}),
            make_request(5, sampling=GREEDY, prefix=[1, 2, 3], budget=3),
            make_request(6, sampling=replace(GREEDY, eos_ids=frozenset({9})), prefix=[1, 9]),
        ]
    )
    await driver.finish(range(1, 7))
    ends = [driver.finishes[handle] for handle in range(1, 7)]
    assert ends == [Finish.EOS, Finish.STOP, Finish.STOP, Finish.LENGTH, Finish.LENGTH, Finish.EOS]
    assert driver.got[1].ids == driver.got[2].ids == driver.got[3].ids == ids[: at + 1]
    assert driver.got[4].ids == ids[:7]
    assert [len(driver.got[handle].ids) for handle in (5, 6)] == [3, 2]


async def test_an_abort_leaves_nothing_and_a_newer_attempt_replaces_the_older(
    engine: Any, serve: Any, make_request: Any
) -> None:
    driver = await serve(0)
    driver.submit([make_request(handle, budget=200) for handle in range(20)])
    await driver.take()
    driver.engine.abort([(0, 1), (2, 1), (17, 1), (7, 9), (99, 1)])
    driver.engine.submit([make_request(3, budget=200)])
    driver.submit([make_request(3, attempt=2, budget=50, prefix=[5, 6])])
    gone = {0, 2, 17}
    while not set(range(20)) - gone <= set(driver.finishes):
        spans = await driver.take()
        assert not {span.handle for span in spans} & gone
        assert {span.attempt for span in spans if span.handle == 3} <= {2}
    assert driver.got[3].ids[:2] == [5, 6]
    assert len(driver.got[3].ids) == 50
    assert (engine.stats().running, engine.stats().waiting) == (0, 0)


async def test_nothing_is_generated_while_paused_and_a_load_does_not_resume(
    engine: Any, serve: Any, make_request: Any
) -> None:
    driver = await serve(0)
    driver.engine.pause()
    driver.submit([make_request(0, budget=20)])
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await driver.engine.spans()
    await serve(1)
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1):
            await driver.engine.spans()
    driver.engine.resume()
    await driver.finish([0])
    assert [run.version for run in driver.got[0].runs] == [engine.version]


async def test_requests_that_sleep_go_on_when_woken(engine: Any, serve: Any, make_request: Any) -> None:
    driver = await serve(0)
    driver.submit([make_request(0, budget=200)])
    await driver.take()
    await engine.sleep()
    await engine.wake()
    await driver.finish([0])
    assert len(driver.got[0].ids) == 200


async def test_padding_of_the_head_is_never_sampled_and_truncation_is_obeyed(serve: Any, make_request: Any) -> None:
    driver = await serve(0)
    masked, narrow = Sampling(temperature=2.0, vocab=40), Sampling(temperature=2.0, top_k=2)
    driver.submit([make_request(handle, budget=100, sampling=masked) for handle in range(8)])
    driver.submit([make_request(8 + handle, group=1, budget=1, sampling=narrow) for handle in range(60)])
    await driver.finish(range(68))
    ids = {token for handle in range(8) for token in driver.got[handle].ids}
    assert max(ids) < 40
    assert len(ids) > 10
    first = [driver.got[8 + handle] for handle in range(60)]
    assert len({tokens.ids[0] for tokens in first}) == 2
    chances = {tokens.ids[0]: np.exp(tokens.logprobs[0]) for tokens in first}
    assert abs(sum(chances.values()) - 1) < 1e-4


async def test_a_request_that_does_not_fit_is_refused_and_none_with_it_is_taken(
    engine: Any, serve: Any, make_request: Any
) -> None:
    driver = await serve(0)
    hot = Sampling(temperature=3.0)  # vLLM goes up to 2
    for bad in ({"budget": 256}, {"prompt": np.array([], dtype=np.uint32)}, {"prefix": [300]}, {"sampling": hot}):
        with pytest.raises(InvalidField):
            driver.engine.submit([make_request(1), make_request(0, **bad)])
    assert engine.stats().running == 0
    driver.submit([make_request(1, budget=4)])
    await driver.finish([1])


async def test_the_prompt_of_a_group_is_shared_and_never_across_versions(
    engine: Any, serve: Any, make_request: Any
) -> None:
    prompt = np.arange(1, 200, dtype=np.uint32)
    driver = await serve(0)
    driver.submit([make_request(0, prompt=prompt, budget=4)])
    await driver.finish([0])
    start = engine.stats().prefill_saved_tokens
    driver.submit([make_request(1, prompt=prompt, budget=4)])
    await driver.finish([1])
    saved = engine.stats().prefill_saved_tokens
    assert saved - start >= 128
    driver = await serve(1)
    driver.submit([make_request(2, prompt=prompt, budget=4)])
    await driver.finish([2])
    assert engine.stats().prefill_saved_tokens == saved


async def test_a_killed_process_is_started_again_and_its_responses_go_on(
    served: Any, engine: Any, serve: Any, make_model: Any, make_request: Any, reference: Any, differences: Any
) -> None:
    """Its other processes are gone, and a greedy response is the one that it would have been."""
    driver = await serve(0)
    driver.submit([make_request(0, budget=200, sampling=GREEDY)])
    await driver.finish([0])
    whole = driver.got[0].ids
    requests = [make_request(handle, group=0, budget=200, sampling=GREEDY) for handle in (1, 2, 3)]
    driver.submit(requests)
    await driver.until(lambda: min(len(driver.got[handle].ids) for handle in (1, 2, 3)) > 20)
    tree = list(engine._process._tree)
    core = next(process for process in tree if process.ppid() == os.getpid())
    os.kill(core.pid, signal.SIGKILL)
    driver.patience_s = 600  # vLLM starts meanwhile
    await driver.finish([1, 2, 3])
    with pytest.raises(EngineBroken, match="died"):
        await engine.spans()
    with pytest.raises(EngineBroken):
        engine.submit([make_request(9)])
    assert len(served.made) == 2
    assert len(tree) == 2
    assert not [process for process in tree if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    directory = make_model(head_dim=32, tied=True, seed=0)
    for request in requests:
        tokens = driver.got[request.handle]
        assert differences(directory, request, tokens).max() < 1e-3
        if tokens.ids != whole:
            at = next(place for place in range(200) if tokens.ids[place] != whole[place])
            top = reference(directory, request.prompt.tolist(), whole)[at].topk(2).values
            assert float(top[0] - top[1]) < 1e-3
