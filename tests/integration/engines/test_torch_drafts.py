"""Drafts change nothing but the time: ids, log-probabilities, versions and ends are those without them."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from rlharvest.engine import Request, Sampling
from rlharvest.spans import Finish, Tokens
from rlharvest.speculation.history import DraftSource, PastResponse
from rlharvest.speculation.options import Speculation

OFF, ON = Speculation(enabled="off"), Speculation(enabled="on")
RESPONSES, BUDGET = 6, 90
PEAKED = Sampling(temperature=0.4)
"""Of the random model: what was drafted is accepted often, and rejected often."""


def history(*responses: list[int], spoil: int = 0, seed: int = 0) -> DraftSource:
    """Return responses as history, every `spoil`-th token of them replaced."""
    rng = random.Random(seed)
    kept = []
    for ids in responses:
        changed = [rng.randrange(1, 300) if spoil and at % spoil == spoil - 1 else id_ for at, id_ in enumerate(ids)]
        kept.append(PastResponse(ids=np.array(changed, np.uint32), epoch=0, version=0, reward=rng.random()))
    return DraftSource(responses=tuple(kept))


async def generate(drive: Any, directory: Any, requests: list[Request], **config: Any) -> tuple[Any, dict[int, Tokens]]:
    """Return the engine's statistics and what came out."""
    async with drive(directory, **config) as driver:
        driver.submit(requests)
        await driver.finish([request.handle for request in requests])
        return driver.engine.stats(), driver.got


@pytest.mark.parametrize(
    ("kind", "dtype", "slots"), [("llama", "float32", 1), ("qwen2", "float32", 6), ("qwen3", "bfloat16", 16)]
)
async def test_drafts_on_is_drafts_off_bit_for_bit(
    kind: str, dtype: str, slots: int, make_model: Any, make_request: Any, drive: Any
) -> None:
    """History that is right, that is wrong every few tokens, and none but the siblings'; batches of 1, 6 and 12."""
    directory = make_model(kind)
    plain = [make_request(handle, group=handle // 2, budget=BUDGET) for handle in range(RESPONSES)]
    _, wanted = await generate(drive, directory, plain, dtype=dtype, speculation=OFF, slots=slots)
    sources = [
        history(*(wanted[handle].ids for handle in (2 * group, 2 * group + 1)), spoil=spoil)
        for group, spoil in enumerate((0, 9, 4))
    ]
    drafted = [
        make_request(
            handle + 100 * copy,
            group=handle // 2,
            seed=1000 + handle,
            budget=BUDGET,
            drafts=sources[handle // 2] if copy == 0 else None,
        )
        for copy in range(2)
        for handle in range(RESPONSES)
    ]
    stats, got = await generate(drive, directory, drafted, dtype=dtype, speculation=ON, slots=slots)
    for handle in range(RESPONSES):
        assert got[handle] == got[100 + handle] == wanted[handle]
    assert stats.generated_tokens == 2 * RESPONSES * BUDGET
    assert 0 < stats.accepted_tokens < stats.drafted_tokens
    assert stats.accepted_tokens > stats.generated_tokens / 5


async def test_100_random_cuts_with_drafts_give_the_uncut_response(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    """Temperature 1, cut anywhere, drafts of different history on both sides of the cut, others joining and leaving."""
    directory = make_model()
    plain = [make_request(handle, budget=BUDGET) for handle in range(RESPONSES)]
    _, uncut = await generate(drive, directory, plain, speculation=OFF)
    rng = random.Random(0)
    cuts = [(rng.randrange(RESPONSES), rng.randrange(BUDGET)) for _ in range(100)]
    sources = [history(uncut[handle].ids, spoil=rng.choice((5, 11, 40))) for handle in range(RESPONSES)]
    requests = []
    for index, (response, cut) in enumerate(cuts):
        requests.append(
            make_request(
                1000 + index,
                group=response,
                seed=1000 + response,
                budget=BUDGET,
                prefix=uncut[response].ids[:cut],
                drafts=rng.choice((None, sources[response])),
            )
        )
        requests.append(make_request(2000 + index, group=rng.randrange(40), budget=rng.randrange(1, 30)))
    stats, got = await generate(drive, directory, requests, speculation=ON, slots=21)
    for index, (response, cut) in enumerate(cuts):
        assert got[1000 + index].ids == uncut[response].ids, f"response {response} cut at {cut}"
        assert got[1000 + index].logprobs[cut:] == uncut[response].logprobs[cut:], f"response {response} cut at {cut}"
    assert stats.accepted_tokens > 500


async def test_an_end_inside_an_accepted_draft_ends_the_response_there(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    """End of sequence, stop string and budget, each with a draft that would go on; nothing comes after the finish."""
    async with drive(make_model(), speculation=ON) as driver:
        driver.submit([make_request(0, budget=80)])
        await driver.finish([0])
        ids = driver.got[0].ids
        at = next(index for index in range(40, 80) if ids[index] not in ids[:index])
        letters = [chr(97 + id_ % 26) + (str(id_ // 26) if id_ >= 26 else "") for id_ in ids]
        eos, stop = Sampling(eos_ids=frozenset({ids[at]})), Sampling(stop=(letters[at - 1] + letters[at],))
        same = {"group": 0, "seed": make_request(0).seed, "drafts": history(ids)}
        before = driver.engine.stats()
        driver.submit(
            [
                make_request(1, sampling=eos, budget=80, **same),
                make_request(2, sampling=stop, budget=80, **same),
                *(make_request(10 + budget, budget=budget, **same) for budget in range(1, 40)),
            ]
        )
        await driver.finish([1, 2, *range(11, 50)])
        accepted = driver.engine.stats().accepted_tokens - before.accepted_tokens
    assert (driver.finishes[1], driver.finishes[2]) == (Finish.EOS, Finish.STOP)
    assert driver.got[1].ids == driver.got[2].ids == ids[: at + 1]
    for budget in range(1, 40):
        assert driver.got[10 + budget].ids == ids[:budget]
        assert driver.finishes[10 + budget] is Finish.LENGTH
    assert accepted > at


@pytest.mark.parametrize("kv", ["recompute", "keep"])
async def test_a_load_between_two_windows_gives_each_token_its_version(
    kv: str, make_model: Any, make_request: Any, drive: Any
) -> None:
    """Versions never go back, every token has one, and under `recompute` a draftless engine agrees on what came after."""
    first, second = make_model(seed=0), make_model(seed=1)
    _, old = await generate(drive, first, [make_request(0, budget=BUDGET)], speculation=OFF)
    async with drive(first, speculation=ON, kv=kv) as driver:
        source = history(old[0].ids)
        driver.submit([make_request(handle, group=0, seed=1000, budget=BUDGET, drafts=source) for handle in range(4)])
        await driver.until(lambda: len(driver.got[0].ids) > 10)
        await driver.engine.load(second, 2)
        await driver.finish(range(4))
    for handle in range(4):
        runs = driver.got[handle].runs
        assert [run.version for run in runs] == [1, 2]
        assert driver.got[handle].ids[: runs[0].n] == old[0].ids[: runs[0].n]
        if kv == "recompute":
            prefix = driver.got[handle].ids[: runs[0].n]
            again = make_request(handle, group=0, seed=1000, budget=BUDGET, prefix=prefix)
            _, moved = await generate(drive, second, [again], speculation=OFF)
            assert moved[handle].ids == driver.got[handle].ids
            assert moved[handle].logprobs[runs[0].n :] == driver.got[handle].logprobs[runs[0].n :]


async def test_an_abort_between_two_windows_leaves_nothing_and_disturbs_nobody(
    make_model: Any, make_request: Any, drive: Any
) -> None:
    _, wanted = await generate(
        drive, make_model(), [make_request(handle, budget=BUDGET) for handle in range(6)], speculation=OFF
    )
    async with drive(make_model(), speculation=ON, slots=4) as driver:
        driver.submit([make_request(h, budget=BUDGET, drafts=history(wanted[h].ids, spoil=7)) for h in range(6)])
        await driver.take()
        driver.engine.abort([(0, 1), (2, 1), (5, 1)])
        while not {1, 3, 4} <= set(driver.finishes):
            assert {span.handle for span in await driver.take()} <= {1, 3, 4}
        driver.submit([make_request(0, attempt=2, budget=BUDGET, prefix=wanted[0].ids[:40])])
        await driver.finish([0])
    for handle in (1, 3, 4):
        assert driver.got[handle] == wanted[handle]
    assert driver.got[0].ids == wanted[0].ids


@pytest.mark.parametrize("enabled", ["on", "auto"])
async def test_the_fast_mode_samples_the_same_distribution_with_drafts(
    enabled: Any, make_model: Any, make_request: Any, drive: Any
) -> None:
    """Its bits depend on the shape of a step, its numbers to no more than rounding."""
    requests = [make_request(handle, group=handle // 4, budget=60) for handle in range(16)]
    _, wanted = await generate(drive, make_model(), requests, speculation=OFF, batch_invariant=False)
    sources = [history(*(wanted[4 * group + n].ids for n in range(4)), spoil=13) for group in range(4)]
    drafted = [make_request(h, group=h // 4, budget=60, drafts=sources[h // 4]) for h in range(16)]
    stats, got = await generate(
        drive, make_model(), drafted, speculation=Speculation(enabled=enabled), batch_invariant=False
    )
    same = [handle for handle in range(16) if got[handle].ids == wanted[handle].ids]
    assert len(same) >= 14
    for handle in same:
        assert np.allclose(got[handle].logprobs, wanted[handle].logprobs, atol=1e-4)
    assert enabled == "auto" or stats.accepted_tokens > 16 * 20


async def test_the_engine_forgets_history_beyond_its_memory(make_model: Any, make_request: Any, drive: Any) -> None:
    async with drive(make_model(), speculation=ON, draft_memory_bytes=40_000) as driver:
        for group in range(6):
            driver.submit([make_request(group * 10 + n, group=group, budget=60) for n in range(4)])
            await driver.finish(group * 10 + n for n in range(4))
        assert 0 < driver.engine.draft_memory <= 40_000
