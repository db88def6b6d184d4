"""Row blocks, attention, the prompt cache, the outbox, stop strings and architectures, each alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
from hypothesis import given
from hypothesis import strategies as st
from rlharvest.engine import EngineBroken
from rlharvest.errors import InvalidField
from rlharvest.spans import Finish, Run
from rlharvest_rollout.engines.outbox import Outbox, Token
from rlharvest_rollout.engines.stops import StopText
from rlharvest_rollout.engines.torch.architecture import architecture
from rlharvest_rollout.engines.torch.attention import attend, attend_blocks
from rlharvest_rollout.engines.torch.kv_cache import Prompt, PromptCache
from rlharvest_rollout.engines.torch.linear import row_blocks
from rlharvest_rollout.engines.torch.numerics import ROW_BLOCK, ROW_BLOCKS, Numerics, split

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


@given(st.integers(1, 5000), st.sets(st.sampled_from(ROW_BLOCKS)))
def test_a_split_holds_all_rows_in_allowed_blocks_with_little_padding(rows: int, blocks: set[int]) -> None:
    blocks = blocks | {ROW_BLOCK}
    sizes = split(rows, blocks)
    assert set(sizes) <= blocks
    assert 0 <= sum(sizes) - rows < 64
    assert sum(sizes[:-1]) < rows


def test_without_blocks_rows_stay_together() -> None:
    assert split(17, ()) == [17]


def test_the_probe_allows_only_blocks_with_the_bits_of_16() -> None:
    numerics = Numerics(dtype="float32", invariant=True, threads=1)
    found = row_blocks({(96, 64, False)}, numerics)
    assert found == () or ROW_BLOCK in found


@pytest.mark.parametrize("change", [{"dtype": "bfloat16"}, {"invariant": False}, {"threads": 2}, {"weights": "int8"}])
def test_what_changes_the_bits_changes_the_key(change: dict[str, Any]) -> None:
    values: dict[str, Any] = {"dtype": "float32", "invariant": True, "threads": 1}
    assert Numerics(**values).key != Numerics(**{**values, **change}).key


def test_attention_in_blocks_is_attention_and_ignores_what_lies_behind() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(5, 2, 16), torch.randn(5, 96, 16), torch.randn(5, 96, 16)
    hidden = torch.arange(96) > torch.randint(0, 32, (5, 1))
    bias = torch.zeros(5, 1, 96).masked_fill(hidden[:, None], float("-inf"))
    blocks = attend_blocks(q, k, v, bias, 32)
    assert torch.allclose(blocks, attend(q, k, v, bias), atol=1e-6)
    assert torch.equal(blocks, attend_blocks(q, k[:, :32], v[:, :32], bias[..., :32], 32))


def test_the_prompt_cache_forgets_the_least_recently_used() -> None:
    prompt = Prompt(kv=torch.zeros(1, 2, 1, 10, 8), logits=torch.zeros(4))
    cache = PromptCache(2 * prompt.bytes)
    for name in (b"a", b"b"):
        cache.put(name, prompt)
    assert cache.get(b"a") is prompt
    cache.put(b"c", prompt)
    assert len(cache) == 2
    assert cache.get(b"b") is None
    assert cache.get(b"a") is not None
    cache.clear()
    assert cache.get(b"a") is None


def test_a_prompt_larger_than_the_cache_is_not_kept() -> None:
    prompt = Prompt(kv=torch.zeros(1, 2, 1, 10, 8), logits=torch.zeros(4))
    cache = PromptCache(prompt.bytes - 1)
    cache.put(b"a", prompt)
    assert len(cache) == 0


def token(handle: int, attempt: int, offset: int, id_: int | None, finish: Finish = Finish.NONE) -> Token:
    return Token(handle=handle, attempt=attempt, offset=offset, id=id_, logprob=-1.0, finish=finish)


def test_the_outbox_gathers_a_response_into_one_span_with_version_runs() -> None:
    outbox = Outbox(lambda: None)
    assert outbox.want(1, 5)
    outbox.put([token(1, 5, 3, 10)], 1)
    outbox.put([token(1, 5, 4, 11)], 1)
    outbox.put([token(1, 5, 5, 12, Finish.EOS)], 2)
    (span,) = outbox.take()
    assert (span.offset, span.ids.tolist(), span.finish) == (3, [10, 11, 12], Finish.EOS)
    assert span.runs == (Run(2, 1), Run(1, 2))
    assert span.ids.dtype == np.uint32
    assert span.logprobs.dtype == np.float32
    assert outbox.take() == []


def test_nothing_of_an_aborted_or_replaced_attempt_comes_out() -> None:
    outbox = Outbox(lambda: None)
    outbox.want(1, 5)
    outbox.want(2, 5)
    outbox.put([token(1, 5, 0, 10), token(2, 5, 0, 10)], 1)
    outbox.forget([(1, 5)])
    outbox.want(2, 6)
    outbox.put([token(1, 5, 1, 10), token(2, 5, 1, 10), token(2, 6, 0, 20)], 1)
    (span,) = outbox.take()
    assert (span.handle, span.attempt, span.ids.tolist()) == (2, 6, [20])


def test_an_attempt_that_is_here_is_not_wanted_again() -> None:
    """Also when it has ended and only its tokens are left."""
    outbox = Outbox(lambda: None)
    assert outbox.want(1, 5)
    assert not outbox.want(1, 5)
    outbox.put([token(1, 5, 0, 10, Finish.LENGTH)], 1)
    assert not outbox.want(1, 5)
    assert len(outbox.take()) == 1


def test_a_broken_engine_gives_its_last_tokens_first() -> None:
    outbox = Outbox(lambda: None)
    outbox.want(1, 5)
    outbox.put([token(1, 5, 0, 10)], 1)
    outbox.fail(EngineBroken("it died"))
    assert len(outbox.take()) == 1
    with pytest.raises(EngineBroken, match="it died"):
        outbox.take()


def byte_tokenizer() -> tokenizers.Tokenizer:
    """Return one token a byte, in the manner of GPT-2, and a special one."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=257,
        special_tokens=["<eos>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([], trainer)
    return tokenizer


@given(st.text(max_size=30), st.sampled_from(["END", "é", "\n\n", "日本"]), st.text(max_size=10), st.booleans())
def test_the_tail_holds_a_stop_string_at_the_token_where_the_whole_text_first_does(
    before: str, stop: str, after: str, special: bool
) -> None:
    """Characters of many bytes, and special tokens inside the stop string, included."""
    tokenizer = byte_tokenizer()
    text = StopText(tokenizer)
    half = len(stop) // 2
    parts = [before + stop[:half], stop[half:] + after]
    ids = tokenizer.encode(parts[0], add_special_tokens=False).ids
    ids += [0, 0] * special + tokenizer.encode(parts[1], add_special_tokens=False).ids
    first_whole = next(n for n in range(len(ids) + 1) if stop in text.whole(ids[:n]))
    first_tail = next(n for n in range(len(ids) + 1) if stop in text.tail(ids[:n], [stop]))
    assert first_tail == first_whole


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"model_type": "gpt2"}, "model.model_type"),
        ({"model_type": "mistral"}, "model.model_type"),
        ({"vision_config": {}}, "model.model_type"),
        ({"quantization_config": {"quant_method": "gptq"}}, "model.quantization_config"),
        ({"auto_map": {"AutoModelForCausalLM": "x.Y"}}, "model.auto_map"),
        ({"hidden_act": "gelu"}, "model.hidden_act"),
        ({"use_sliding_window": True}, "model.use_sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "model.use_sliding_window"),
        ({"num_key_value_heads": 3}, "model.num_key_value_heads"),
        ({"vocab_size": None}, "model.vocab_size"),
        ({"hidden_size": -1}, "model.hidden_size"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "model.rope_parameters.rope_type"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "model.rope_parameters"),
        ({"partial_rotary_factor": 0.5}, "model.partial_rotary_factor"),
    ],
)
def test_what_the_network_does_not_compute_is_refused_by_name(change: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidField) as refused:
        architecture({**LLAMA, **change})
    assert refused.value.field == field
    assert refused.value.fix


def test_older_and_newer_ways_to_write_rope_are_read() -> None:
    assert architecture({**LLAMA, "rope_theta": 5e5}).rope.theta == 5e5
    assert architecture({**LLAMA, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}).rope.theta == 5e5
    assert architecture({**LLAMA, "rope_scaling": {"type": "linear", "factor": 2.0}}).rope.factor == 2.0
