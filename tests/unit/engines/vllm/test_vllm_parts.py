"""The pure parts of the vLLM engine: no vLLM is needed for them."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rlharvest.engine import EngineConfig, Request, Sampling
from rlharvest.errors import CorruptData, InvalidField
from rlharvest.spans import Finish
from rlharvest.speculation.options import Speculation
from rlharvest.terminal import terminal
from rlharvest.testing.model import tiny_model
from rlharvest_rollout.engines.vllm.arguments import Machine, drafts, engine_arguments, environment, numerics_key
from rlharvest_rollout.engines.vllm.guards import expand_batch_to_tokens
from rlharvest_rollout.engines.vllm.requests import NotFinite, Response, check_fits, sampling_arguments, version_runs
from rlharvest_rollout.engines.vllm.selftest import Greedy, excess, surprise
from rlharvest_rollout.engines.vllm.weights import read_layout

CONFIG = EngineConfig(slots=8, context=128, options={})


def request(**changes: Any) -> Request:
    values: dict[str, Any] = {
        "handle": 3,
        "attempt": 1,
        "group": 0,
        "seed": 0,
        "prompt": np.array([1, 2], np.uint32),
        "prefix": np.array([], np.uint32),
        "budget": 10,
        "sampling": Sampling(),
    }
    return Request(**{**values, **changes})


@settings(deadline=None)
@given(
    ids=st.lists(st.integers(0, 9), max_size=20),
    cuts=st.lists(st.integers(1, 5), max_size=20),
    prefix=st.integers(0, 3),
    budget=st.integers(1, 20),
)
def test_a_response_ends_where_the_rule_ends_it_however_its_tokens_arrive(
    ids: list[int], cuts: list[int], prefix: int, budget: int
) -> None:
    sampling = Sampling(eos_ids=frozenset({9}))
    response = Response.of(request(prefix=np.array(ids[:prefix], np.uint32), budget=budget, sampling=sampling), None)
    tokens, rest = [], ids[prefix:]
    while rest and cuts:
        n = cuts.pop()
        tokens += response.take(rest[:n], [-1.0] * len(rest[:n]))
        rest = rest[n:]
    got = ids[:prefix] + [token.id for token in tokens]
    assert response.ids == got
    assert response.finish is terminal(got, eos_ids={9}, budget=budget)
    assert [token.offset for token in tokens] == list(range(prefix, prefix + len(tokens)))
    assert [token.finish for token in tokens[:-1]] == [Finish.NONE] * (len(tokens) - 1)


def test_a_logprob_that_is_no_number_is_refused() -> None:
    with pytest.raises(NotFinite):
        Response.of(request(), None).take([1], [math.nan])


def test_vllm_stops_at_nothing_of_its_own_and_gets_no_seed() -> None:
    sampling = Sampling(
        temperature=0.7, top_p=0.9, top_k=5, min_p=0.1, eos_ids=frozenset({7, 2}), stop=("x",), vocab=98
    )
    arguments = sampling_arguments(sampling, budget=4, vocab=100)
    assert arguments["ignore_eos"]
    assert arguments["stop_token_ids"] == [2, 7]
    assert arguments["logit_bias"] == {98: -math.inf, 99: -math.inf}
    assert not {"seed", "stop"} & set(arguments)
    assert "logit_bias" not in sampling_arguments(Sampling(vocab=100), budget=4, vocab=100)
    with_drafts = sampling_arguments(sampling, budget=4, vocab=100, drafts=True)
    assert with_drafts["allowed_token_ids"] == list(range(98))
    assert "logit_bias" not in with_drafts


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"prompt": np.array([], np.uint32)}, "it is empty"),
        ({"budget": 127}, "the context is 128"),
        ({"prefix": np.array([50], np.uint32)}, "50 tokens"),
        ({"sampling": Sampling(stop=("x",))}, r"tokenizer\.json"),
        ({"sampling": Sampling(min_p=0.1)}, r"speculation\.enabled: off"),
    ],
)
def test_a_request_that_does_not_fit_says_why(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidField, match=words):
        check_fits(request(**changes), context=128, vocab=50, stop_text=None, drafts=True)


@settings(deadline=None)
@given(
    firsts=st.lists(st.integers(1, 9), min_size=1, max_size=5),
    parts=st.lists(st.integers(1, 7), min_size=1, max_size=8),
)
def test_every_token_has_the_version_of_its_label(firsts: list[int], parts: list[int]) -> None:
    starts = [sum(firsts[1 : index + 1]) for index in range(len(firsts))]
    labels = [(str(index), start) for index, start in enumerate(starts)]
    total, found = 0, []
    for n in parts:
        for start, end, version in version_runs(labels, total, total + n):
            found += [version] * (end - start)
        total += n
    assert found == [max(index for index, start in enumerate(starts) if start <= token) for token in range(total)]


def test_labels_of_one_place_leave_the_last_one() -> None:
    """A version that no token was sampled under."""
    assert version_runs([("1", 0), ("2", 4), ("3", 4)], 0, 6) == [(0, 4, 1), (4, 6, 3)]


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=8), st.sampled_from([torch.float32, torch.int32, torch.int64]))
def test_values_are_expanded_to_their_tokens(counts: list[int], dtype: torch.dtype) -> None:
    values = torch.arange(len(counts)).to(dtype)
    expanded = expand_batch_to_tokens(
        values, torch.tensor(counts, dtype=torch.int32).cumsum(0, dtype=torch.int32), sum(counts), 0, 1
    )
    wanted = [max(index, 1) if index == 0 else index for index, n in enumerate(counts) for _ in range(n)]
    assert expanded.dtype == dtype
    assert expanded.tolist() == wanted


def test_true_frequencies_are_no_surprise_and_wrong_ones_are() -> None:
    chances = {0: 0.5, 1: 0.3, 2: 0.1, 3: 0.001}
    tokens, weights = [*chances, 9], [*chances.values(), 0.099]
    for seed in range(200):
        draws = random.Random(seed).choices(tokens, weights, k=128)
        assert surprise({token: draws.count(token) for token in tokens}, chances, 128) < 12
    flat = random.Random(0).choices(tokens, k=128)
    assert surprise({token: flat.count(token) for token in tokens}, chances, 128) > 12
    assert surprise({5: 128}, {0: 0.999999}, 128) > 12


def test_continuations_are_compared_up_to_their_first_difference() -> None:
    one = Greedy((1, 2, 3), (-0.1, -0.2, -0.3))
    assert one.difference(Greedy((1, 2, 3), (-0.1, -0.2, -0.3))) == 0
    assert one.difference(Greedy((1, 4, 9), (-0.1, -0.2, -9.0))) == 0
    assert one.difference(Greedy((1, 4, 9), (-0.1, -0.7, -9.0))) == pytest.approx(0.5)


def test_a_cpu_and_a_gpu_get_what_each_needs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cpu = Machine(device="cpu", isa="AVX2", threads=2, slots=4, kv_memory_bytes=1 << 20)
    gpu = Machine(device="A GPU", tensor_parallel=2, gpu_memory=0.5)
    small = engine_arguments(CONFIG, cpu, tmp_path, seed=1)
    assert (small["kv_cache_memory_bytes"], small["max_num_seqs"], small["max_model_len"]) == (1 << 20, 4, 128)
    large = engine_arguments(CONFIG, gpu, tmp_path, seed=1)
    assert (large["gpu_memory_utilization"], large["tensor_parallel_size"], large["max_num_seqs"]) == (0.5, 2, 8)
    assert "enforce_eager" not in large
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    assert "OMP_NUM_THREADS" not in environment(cpu)
    assert numerics_key(CONFIG, cpu, release="1") == "vllm/1/cpu-AVX2-threads2/float32/tp1/any-order"
    assert numerics_key(CONFIG, gpu, release="1") == "vllm/1/A-GPU/float32/tp2/any-order"


def test_on_a_gpu_drafts_must_be_asked_for(tmp_path: Path) -> None:
    cpu, gpu = Machine(device="cpu", slots=4), Machine(device="A GPU")

    def config(enabled: Any, window: int = 200) -> EngineConfig:
        return EngineConfig(
            slots=8, context=128, speculation=Speculation(enabled=enabled, window_max=window), options={}
        )

    asked = [(machine, enabled) for machine in (cpu, gpu) for enabled in ("on", "auto", "off")]
    assert [drafts(config(enabled), machine) for machine, enabled in asked] == [True, True, False, True, False, False]
    assert "speculative_config" not in engine_arguments(config("off"), cpu, tmp_path, seed=1)
    longest = engine_arguments(config("auto"), cpu, tmp_path, seed=1)["speculative_config"]
    assert longest["num_speculative_tokens"] == 127
    assert longest["num_speculative_tokens_per_batch_size"] == [(1, 4, 127)]
    shorter = engine_arguments(config("on", 8), gpu, tmp_path, seed=1)["speculative_config"]
    assert shorter["num_speculative_tokens"] == 8
    assert "num_speculative_tokens_per_batch_size" not in shorter


def test_events_that_come_true_too_often_are_in_excess() -> None:
    chances = [0.5] * 100
    assert excess([True, False] * 50, chances) == 0
    assert excess([True] * 100, chances) == pytest.approx(10)
    assert excess([False], [1e-9]) == pytest.approx(0, abs=1e-6)


def test_versions_of_one_layout_fit_and_others_are_named(tmp_path: Path) -> None:
    one, same = tiny_model(tmp_path / "one"), tiny_model(tmp_path / "same", seed=1)
    layout = read_layout(one)
    layout.check_same(read_layout(same), same)
    wide = tiny_model(tmp_path / "wide", hidden=32)
    with pytest.raises(InvalidField, match=r"model\.hidden_size.*before have 16"):
        layout.check_same(read_layout(wide), wide)
    config = json.loads((same / "config.json").read_text())
    (same / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    with pytest.raises(InvalidField, match="tie_word_embeddings"):
        layout.check_same(read_layout(same), same)


def test_a_directory_that_is_no_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match=r"config\.json"):
        read_layout(tmp_path)
    model = tiny_model(tmp_path / "model")
    whole = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(CorruptData, match=rf"\({len(whole) - 1} bytes\)"):
        read_layout(model)
    (model / "model.safetensors").unlink()
    with pytest.raises(InvalidField, match="no safetensors"):
        read_layout(model)
