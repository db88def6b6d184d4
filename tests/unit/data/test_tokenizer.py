"""Text to ids as transformers does it, and ids to text without ever failing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rlharvest.errors import InvalidField
from rlharvest_coordinator.data.tokenizer import load
from transformers import AutoTokenizer

MakeModel = Callable[..., Path]


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("words", [{}, {"add_bos_token": True}, {"add_bos_token": False}])
def test_plain_strings_get_one_bos_where_the_tokenizer_wants_one(
    make_model: MakeModel, bos: bool, words: dict[str, Any]
) -> None:
    tokenizer = load(make_model(bos=bos, said=words), eos_ids=[], field="model")
    expected = words.get("add_bos_token", bos)
    assert tokenizer.encode_plain(["ab"])[0][:1] == ([1] if expected else tokenizer.encode_rendered(["a"])[0])
    assert tokenizer.encode_rendered(["<s>ab"])[0].count(1) == 1


@pytest.mark.parametrize("bos", [False, True])
def test_ids_equal_those_of_transformers(make_model: MakeModel, bos: bool) -> None:
    directory = make_model(bos=bos)
    tokenizer = load(directory, eos_ids=[], field="model")
    theirs = AutoTokenizer.from_pretrained(directory)
    for text in ["2+2=", "a</s>b <|im_start|>", " x\n"]:
        assert tokenizer.encode_plain([text])[0] == theirs(text)["input_ids"]
        assert tokenizer.encode_rendered([text])[0] == theirs(text, add_special_tokens=False)["input_ids"]


def test_eos_ids_are_all_that_any_file_names(make_model: MakeModel) -> None:
    tokenizer = load(make_model(), eos_ids=[4], field="model")
    assert tokenizer.eos_ids == {2, 4}
    assert tokenizer.bos_id == 1


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)
@given(ids=st.lists(st.integers(-(2**40), 2**40) | st.integers(-5, 110), max_size=20))
def test_decoding_never_fails(tokenizer_once: Any, ids: list[int]) -> None:
    assert isinstance(tokenizer_once.decode(ids), str)


@pytest.fixture
def tokenizer_once(make_model: MakeModel) -> Any:
    return load(make_model(), eos_ids=[], field="model")


def test_decoding_leaves_special_tokens_out(make_model: MakeModel) -> None:
    tokenizer = load(make_model(), eos_ids=[], field="model")
    ids = tokenizer.encode_rendered(["<s>12+7=</s>"])[0]
    assert tokenizer.decode([*ids, 10_000, -1]) == "12+7="


def test_the_digest_covers_tokenizer_and_template(make_model: MakeModel) -> None:
    one = load(make_model("one"), eos_ids=[], field="model")
    same = load(make_model("same"), eos_ids=[7], field="model")
    chat = load(make_model("chat", template="{{ messages[0].content }}"), eos_ids=[], field="model")
    other = load(make_model("other", bos=True), eos_ids=[], field="model")
    assert one.digest == same.digest
    assert len({one.digest, chat.digest, other.digest}) == 3


@pytest.mark.parametrize(
    ("content", "says"),
    [(None, "there is no tokenizer.json"), ("{}", "is no tokenizer"), ("version https://git-lfs", "is no tokenizer")],
)
def test_a_tokenizer_that_cannot_be_read_is_refused(make_model: MakeModel, content: str | None, says: str) -> None:
    directory = make_model()
    (directory / "tokenizer.json").unlink()
    if content is not None:
        (directory / "tokenizer.json").write_text(content)
    with pytest.raises(InvalidField, match=says):
        load(directory, eos_ids=[], field="model")


def test_a_slow_tokenizer_alone_is_refused_with_the_way_out(make_model: MakeModel) -> None:
    directory = make_model()
    (directory / "tokenizer.json").rename(directory / "tokenizer.model")
    with pytest.raises(InvalidField, match=r"only tokenizer\.model.*save_pretrained"):
        load(directory, eos_ids=[], field="tokenizer")


def test_a_template_that_does_not_compile_names_the_directory(make_model: MakeModel) -> None:
    with pytest.raises(InvalidField, match="does not compile"):
        load(make_model(template="{% for %}"), eos_ids=[], field="model")


def test_padding_and_truncation_of_the_file_are_off(make_model: MakeModel) -> None:
    directory = make_model()
    said = json.loads((directory / "tokenizer.json").read_text())
    said["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    (directory / "tokenizer.json").write_text(json.dumps(said))
    tokenizer = load(directory, eos_ids=[], field="model")
    assert [len(ids) for ids in tokenizer.encode_rendered(["a" * 9, "a"])] == [9, 1]
