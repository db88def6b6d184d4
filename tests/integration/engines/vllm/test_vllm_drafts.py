"""Drafts from history in vLLM change nothing but the time."""

from __future__ import annotations

import math
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from rlharvest.engine import EngineConfig, Sampling
from rlharvest.errors import InvalidField
from rlharvest.spans import Finish
from rlharvest.speculation.history import DraftSource, PastResponse
from rlharvest.speculation.options import Speculation
from safetensors.torch import load_file, save_file

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.asyncio(loop_scope="module")]

CONFIG = EngineConfig(
    slots=64, context=256, speculation=Speculation(enabled="on", match_min=1, window_max=12), options={}
)
GREEDY = Sampling(temperature=0.0)


def history(*responses: list[int]) -> DraftSource:
    past = [
        PastResponse(ids=np.array(ids, np.uint32), epoch=0, version=0, reward=float(rank))
        for rank, ids in enumerate(responses)
    ]
    return DraftSource(responses=tuple(past))


@pytest.fixture
def propose(engine: Any) -> Any:
    """Have the worker draft always the same, or, with None, from history again."""

    async def propose(tokens: list[int] | None) -> None:
        await engine._process.call("guard_draft_always", tokens)

    return propose


@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
async def test_with_drafts_greedy_tokens_and_all_log_probabilities_are_the_same(
    temperature: float, engine: Any, serve: Any, propose: Any, make_model: Any, make_request: Any, differences: Any
) -> None:
    driver, sampling = await serve(0), Sampling(temperature=temperature)
    await propose([])
    driver.submit([make_request(handle, budget=100, sampling=sampling) for handle in range(8)])
    await driver.finish(range(8))
    await propose(None)
    before = engine.stats()
    requests = [
        make_request(8 + handle, group=handle, budget=100, sampling=sampling, drafts=history(driver.got[handle].ids))
        for handle in range(8)
    ]
    driver.submit(requests)
    await driver.finish(range(8, 16))
    if temperature == 0:
        assert [driver.got[8 + handle].ids for handle in range(8)] == [driver.got[handle].ids for handle in range(8)]
    after = engine.stats()
    assert after.drafted_tokens - before.drafted_tokens > 100
    if temperature == 0:
        assert after.accepted_tokens - before.accepted_tokens > 500
    directory = make_model(head_dim=32, tied=True, seed=0)
    found = [differences(directory, one, driver.got[one.handle], temperature or 1.0) for one in requests]
    assert np.concatenate(found).mean() < 1e-4


async def test_sampled_tokens_come_as_often_with_drafts_as_their_probabilities_say(
    served: Any, engine: Any, propose: Any, make_model: Any, make_request: Any, driver_of: Any, tmp_path: Path
) -> None:
    """A chi-square test of 25,000 transitions, in a model whose next token depends on the present one alone."""
    directory = shutil.copytree(make_model(head_dim=32, tied=True, seed=2), tmp_path / "memoryless")
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in tensors.items():
        if name.endswith("self_attn.o_proj.weight"):
            tensor.zero_()
    tensors["model.norm.weight"] *= (
        2  # less to choose from: more drafts are accepted, and more draws fall into each bin
    )
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    await served.whole.load(directory, (engine.version or 0) + 1)
    sampling, n, length = Sampling(temperature=0.7), 250, 101
    prompt = np.arange(1, 9, dtype=np.uint32)
    driver = driver_of(served.whole, 120.0)
    driver.submit([make_request(0, prompt=prompt, budget=200, sampling=sampling)])
    await driver.finish([0])
    source, before = history(driver.got[0].ids), engine.stats()
    requests = [make_request(handle, prompt=prompt, budget=length, sampling=sampling, drafts=source)
                for handle in range(1, n + 1)]  # fmt: skip
    driver.submit(requests)
    await driver.finish(range(1, n + 1))
    after = engine.stats()
    assert after.drafted_tokens - before.drafted_tokens > n * length / 4
    assert after.accepted_tokens - before.accepted_tokens > n * length / 20
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        chances = (model(torch.arange(300)[:, None]).logits[:, 0].double() / sampling.temperature).softmax(-1).numpy()
    pairs = Counter(
        pair
        for handle in range(1, n + 1)
        for pair in zip(driver.got[handle].ids, driver.got[handle].ids[1:], strict=False)
    )
    statistic, freedom, draws = 0.0, 0, 0
    for token in range(300):
        counts = np.array([pairs[token, other] for other in range(300)])
        expected = counts.sum() * chances[token]
        large = expected >= 5
        bins = [*zip(counts[large], expected[large], strict=True), (counts[~large].sum(), expected[~large].sum())]
        bins = [(found, wanted) for found, wanted in bins if wanted >= 5]
        if len(bins) > 1:
            statistic += sum((found - wanted) ** 2 / wanted for found, wanted in bins)
            freedom += len(bins) - 1
            draws += sum(int(found) for found, _ in bins)
    assert draws > 20_000
    assert freedom > 500
    assert (statistic - freedom) / math.sqrt(2 * freedom) < 5


async def test_only_what_was_proposed_is_verified(engine: Any, serve: Any, propose: Any, make_request: Any) -> None:
    """Neither the padding of a request that is cached but for one token, nor zeros near the end of the context."""
    driver, prompt = await serve(0), np.arange(1, 98, dtype=np.uint32)
    await propose([])
    before = engine.stats()
    driver.submit([make_request(0, prompt=prompt, budget=159)])
    await driver.finish([0])
    driver.submit([make_request(1, prompt=prompt, budget=159), make_request(2, budget=8)])
    await driver.finish([1, 2])
    await propose(None)
    assert driver.finishes[1] is Finish.LENGTH
    assert engine.stats().prefill_saved_tokens - before.prefill_saved_tokens == 96
    assert engine.stats().drafted_tokens == before.drafted_tokens


async def test_a_version_is_switched_under_responses_with_drafts(
    engine: Any, serve: Any, make_model: Any, make_request: Any, differences: Any
) -> None:
    driver = await serve(0)
    driver.submit([make_request(0, budget=200, sampling=GREEDY)])
    await driver.finish([0])
    source, before = history(driver.got[0].ids), engine.version
    requests = [make_request(handle, group=0, budget=200, drafts=source) for handle in range(1, 9)]
    driver.submit(requests)
    await driver.until(lambda: min(len(driver.got[handle].ids) for handle in range(1, 9)) > 10)
    await serve(1)
    await driver.finish(range(1, 9))
    models = {
        before: make_model(head_dim=32, tied=True, seed=0),
        engine.version: make_model(head_dim=32, tied=True, seed=1),
    }
    for request in requests:
        tokens = driver.got[request.handle]
        assert [run.version for run in tokens.runs] == list(models)
        cut = tokens.runs[0].n
        old, new = (differences(directory, request, tokens) for directory in models.values())
        assert old[:cut].max() < 1e-3
        assert new[cut:].max() < 1e-3


async def test_a_continuation_drafts_as_the_response_would_have(engine: Any, serve: Any, make_request: Any) -> None:
    driver = await serve(0)
    driver.submit([make_request(0, budget=100, sampling=GREEDY)])
    await driver.finish([0])
    ids = driver.got[0].ids
    before = engine.stats()
    driver.submit([make_request(1, group=0, budget=100, sampling=GREEDY, prefix=ids[:40], drafts=history(ids))])
    await driver.finish([1])
    assert driver.got[1].ids == ids
    assert engine.stats().accepted_tokens - before.accepted_tokens > 30


async def test_padding_of_the_head_is_never_sampled_and_what_drafts_exclude_is_refused(
    serve: Any, make_request: Any
) -> None:
    driver = await serve(0)
    masked = Sampling(temperature=2.0, vocab=40)
    source = history(list(range(40, 100)), [7, 50, 8, 60] * 20)
    driver.submit([make_request(handle, group=0, budget=100, sampling=masked, drafts=source) for handle in range(8)])
    await driver.finish(range(8))
    ids = {token for handle in range(8) for token in driver.got[handle].ids}
    assert max(ids) < 40
    assert len(ids) > 10
    with pytest.raises(InvalidField, match=r"min_p.*verifies drafts"):
        driver.engine.submit([make_request(9, sampling=replace(masked, min_p=0.1))])
