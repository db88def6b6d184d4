"""Requests of the gateway: what is read from them, what is ignored, what is refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError
from rlharvest.errors import InvalidField
from rlharvest.testing.model import CHAT, CHATML, tiny_model
from rlharvest_coordinator.data import tokenizer
from rlharvest_coordinator.data.prepare import Prepared
from rlharvest_coordinator.gateway import request
from rlharvest_coordinator.gateway.request import ChatAsk, CompletionAsk, Order

CONTEXT = 100


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    """What a request is held against: a tokenizer of characters with a chat template, and a context."""
    directory = tiny_model(tmp_path_factory.mktemp("model"), words=CHAT, template=CHATML)
    words = tokenizer.load(directory, eos_ids=[2], field="model")
    return cast(Prepared, SimpleNamespace(tokenizer=words, context=CONTEXT))


def completion(prepared: Prepared, **values: Any) -> Order:
    ask = CompletionAsk.model_validate({"model": "m", "prompt": "abc", **values})
    return request.completion(ask, prepared)


def chat(prepared: Prepared, usual: int = 50, **values: Any) -> Order:
    messages = [{"role": "user", "content": "hi"}]
    return request.chat(ChatAsk.model_validate({"model": "m", "messages": messages, **values}), prepared, usual=usual)


@pytest.mark.parametrize(
    ("prompt", "texts"),
    [
        ("abc", ["abc"]),
        ([5, 6, 7], None),
        (["abc", "de"], ["abc", "de"]),
        ([[5, 6, 7], "x"], None),
    ],
)
def test_a_prompt_is_text_or_token_ids_or_a_list_of_either(prepared: Prepared, prompt: Any, texts: Any) -> None:
    order = completion(prepared, prompt=prompt)
    if texts is not None:
        assert [prepared.tokenizer.decode(ids) for ids in order.prompts] == texts
    elif prompt == [5, 6, 7]:
        assert order.prompts == [[5, 6, 7]]
    else:
        assert order.prompts == [[5, 6, 7], *prepared.tokenizer.encode_plain(["x"])]
    assert order.budget == request.COMPLETION_TOKENS


def test_what_changes_nothing_is_taken_and_ignored(prepared: Prepared) -> None:
    """Labels, fields at the value that asks for nothing, and nulls, as clients send them."""
    neutral = {name: values[0] for name, values in request._NEUTRAL.items()}
    order = completion(prepared, seed=3, user="me", metadata={"a": "b"}, store=True, temperature=None, **neutral)
    assert (order.seed, order.budget) == (3, request.COMPLETION_TOKENS)


@pytest.mark.parametrize("name", sorted(request._NEUTRAL))
def test_what_is_not_offered_is_refused_by_name(prepared: Prepared, name: str) -> None:
    with pytest.raises(InvalidField) as refused:
        completion(prepared, **{name: "something else"})
    assert refused.value.field == name


@pytest.mark.parametrize(
    ("values", "field"),
    [
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": ["x"] * (request.MOST_CHOICES + 1)}, "prompt"),
        ({"n": 0}, "n"),
        ({"n": request.MOST_CHOICES + 1}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"stop": ["x"] * (request.MOST_STOPS + 1)}, "stop"),
        ({"stop": ["x" * (request.MOST_STOP_CHARACTERS + 1)]}, "stop"),
        ({"seed": 2**64}, "seed"),
        ({"logprobs": 1}, "logprobs"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_values_out_of_bounds_are_refused_by_name(values: dict[str, Any], field: str) -> None:
    with pytest.raises(ValidationError) as refused:
        CompletionAsk.model_validate({"model": "m", "prompt": "abc", **values})
    assert refused.value.errors()[0]["loc"][0] == field


def test_a_prompt_and_its_completion_fit_into_the_context(prepared: Prepared) -> None:
    assert completion(prepared, max_tokens=CONTEXT - 3).budget == CONTEXT - 3
    with pytest.raises(InvalidField, match=f"Use at most {CONTEXT - 3}") as refused:
        completion(prepared, max_tokens=CONTEXT - 2)
    assert refused.value.field == "max_tokens"
    with pytest.raises(InvalidField, match="Shorten it") as refused:
        completion(prepared, prompt="x" * CONTEXT)
    assert refused.value.field == "prompt"
    wide = cast(Prepared, SimpleNamespace(tokenizer=prepared.tokenizer, context=10**9))
    with pytest.raises(InvalidField, match="the limit is") as refused:
        completion(wide, max_tokens=request.MOST_GROUP_TOKENS // 2 + 1, n=2)


def test_an_id_that_the_tokenizer_lacks_is_refused(prepared: Prepared) -> None:
    for id in (-1, prepared.tokenizer.vocab):
        with pytest.raises(InvalidField) as refused:
            completion(prepared, prompt=[3, id])
        assert (refused.value.field, refused.value.value) == ("prompt", id)


def test_half_a_surrogate_pair_is_refused(prepared: Prepared) -> None:
    with pytest.raises(InvalidField) as refused:
        completion(prepared, prompt=json.loads(r'"\ud83d"'))
    assert refused.value.field == "prompt"


def test_a_chat_is_rendered_by_the_template_with_the_assistants_turn_open(prepared: Prepared) -> None:
    order = chat(prepared)
    text = "".join(map(prepared.tokenizer.piece, order.prompts[0]))
    assert text == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


def test_a_chat_has_the_length_of_the_jobs_own_responses_unless_it_says_another(prepared: Prepared) -> None:
    used = len(chat(prepared).prompts[0])
    assert chat(prepared, usual=7).budget == 7
    assert chat(prepared, usual=10**6).budget == CONTEXT - used
    assert chat(prepared, max_tokens=9).budget == chat(prepared, max_completion_tokens=9).budget == 9
    with pytest.raises(InvalidField):
        chat(prepared, max_tokens=9, max_completion_tokens=8)


def test_conversations_that_no_template_takes_are_refused(prepared: Prepared, tmp_path: Path) -> None:
    with pytest.raises(InvalidField, match="has no role") as refused:
        chat(prepared, messages=[{"content": "hi"}])
    assert refused.value.field == "messages"
    base = tokenizer.load(tiny_model(tmp_path / "base", words=CHAT), eos_ids=[2], field="model")
    with pytest.raises(InvalidField, match="/v1/completions"):
        chat(cast(Prepared, SimpleNamespace(tokenizer=base, context=CONTEXT)))


@given(st.integers(-(2**63), 2**64 - 1), st.integers(1, 20))
def test_seeds_of_the_prompts_of_a_request_differ(seed: int, n: int) -> None:
    found = request.seeds(seed, [[1]] * n)
    assert len(set(found)) == n
    assert all(0 <= one < 2**64 for one in found)
