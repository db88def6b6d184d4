"""Conversations become what chat templates expect."""

from __future__ import annotations

import pytest
from rlharvest_coordinator.data.messages import BadMessages, normalise, with_system, without_answer

USER = {"role": "user", "content": "q"}


def test_null_keys_that_arrow_fills_in_are_left_out() -> None:
    assert normalise([{"role": "user", "content": "q", "tool_calls": None, "name": None}]) == [USER]


def test_a_list_of_text_parts_becomes_one_string() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}, "c"]
    assert normalise([{"role": "user", "content": parts}]) == [{"role": "user", "content": "abc"}]


def test_null_content_beside_tool_calls_is_empty() -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"id": "1"}]}
    assert normalise([USER, call])[1]["content"] == ""


@pytest.mark.parametrize(
    ("message", "says"),
    [
        ({"role": "user", "content": None}, "message 0 .user. has no content"),
        ({"role": "user"}, "has no content"),
        ({"content": "x"}, "has no role"),
        ({"role": "user", "content": 5}, "content of type int"),
        ({"role": "user", "content": [{"type": "image_url", "image_url": {}}]}, "part of type 'image_url'"),
        ({"role": "user", "content": [{"type": "text"}]}, "part without text"),
        ({"from": "human", "value": "x"}, "ShareGPT"),
        ("x", "message 0 is a str"),
    ],
)
def test_what_is_no_message_is_named(message: object, says: str) -> None:
    with pytest.raises(BadMessages, match=says):
        normalise([message])


def test_only_assistant_turns_at_the_end_are_split_off() -> None:
    assistant = {"role": "assistant", "content": "a"}
    assert without_answer([USER, assistant, USER, assistant, assistant]) == ([USER, assistant, USER], [assistant] * 2)
    assert without_answer([USER]) == ([USER], [])


def test_a_system_prompt_comes_first_and_joins_one_that_is_there() -> None:
    system = {"role": "system", "content": "own"}
    assert with_system([USER], None) == [USER]
    assert with_system([USER], "ours") == [{"role": "system", "content": "ours"}, USER]
    assert with_system([system, USER], "ours")[0] == {"role": "system", "content": "ours\n\nown"}
