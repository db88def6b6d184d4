"""A conversation that is a prompt: checked and brought into the one form that chat templates get.

Keys that are null (Arrow fills in the keys of a struct that other rows have) are left out; a list of text parts
becomes one string; null content is "" beside tool calls and refused elsewhere.
"""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]


class BadMessages(ValueError):
    """A conversation cannot be used as a prompt."""


def normalise(value: list[Any]) -> list[Message]:
    """Return the conversation with each message as {role, content, ...}.

    Raises:
        BadMessages: says which message and why.
    """
    return [_message(index, message) for index, message in enumerate(value)]


def without_answer(messages: list[Message]) -> tuple[list[Message], list[Message]]:
    """Split a conversation into the prompt and the assistant's turns at its end."""
    end = len(messages)
    while end and messages[end - 1]["role"] == "assistant":
        end -= 1
    return messages[:end], messages[end:]


def with_system(messages: list[Message], system_prompt: str | None) -> list[Message]:
    """Put a system message first; one that is there already follows in the same message, after a blank line."""
    if system_prompt is None:
        return messages
    if messages and messages[0]["role"] == "system":
        own = messages[0]
        return [{**own, "content": f"{system_prompt}\n\n{own['content']}"}, *messages[1:]]
    return [{"role": "system", "content": system_prompt}, *messages]


def _message(index: int, message: Any) -> Message:
    if not isinstance(message, dict):
        raise BadMessages(f"message {index} is a {type(message).__name__}, not {{role, content}}")
    kept = {key: value for key, value in message.items() if value is not None}
    role = kept.get("role")
    if not isinstance(role, str):
        if "from" in kept and "value" in kept:
            raise BadMessages(f"message {index} has from/value (ShareGPT); rename them to role/content")
        raise BadMessages(f"message {index} has no role; found {sorted(message)}")
    return {**kept, "role": role, "content": _content(index, role, kept)}


def _content(index: int, role: str, message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None:
        if role == "assistant" and message.get("tool_calls"):
            return ""
        raise BadMessages(f"message {index} ({role}) has no content")
    if isinstance(content, list):
        texts = []
        for part in content:
            text = part.get("text") if isinstance(part, dict) else part
            if isinstance(part, dict) and part.get("type", "text") != "text":
                raise BadMessages(f"message {index} ({role}) has a part of type {part['type']!r}; only text is read")
            if not isinstance(text, str):
                raise BadMessages(f"message {index} ({role}) has a part without text")
            texts.append(text)
        return "".join(texts)
    raise BadMessages(f"message {index} ({role}) has content of type {type(content).__name__}, not text")
