"""Chat templates: from a conversation to the text that the model sees, by the model's own Jinja template.

The environment is the one that templates are written for (that of the transformers library): immutable sandbox,
trimmed blocks, `break` and `continue`, `tojson` without escapes, `raise_exception`, `strftime_now`, `{% generation
%}` blocks (which add nothing here). Text of special tokens inside of a message is not escaped: the tokenizer turns it
into the special token, as transformers does; the dataset's report counts the rows that have such text.
"""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
from jinja2.nodes import CallBlock, Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from rlharvest.errors import DataError

from rlharvest_coordinator.data.messages import Message


class TemplateFailed(DataError):
    """A chat template cannot render a conversation."""


class _Generation(jinja2.ext.Extension):
    """Reads {% generation %} ... {% endgeneration %}, which marks the assistant's tokens, as its content."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 reads it as a class attribute

    def parse(self, parser: Parser) -> Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

    def _content(self, caller: Any) -> str:
        return str(caller())


class ChatTemplate:
    """One compiled template."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Compile `source`; `special_tokens` (bos_token, eos_token, ...) are variables of the template.

        Raises:
            TemplateFailed: it is no Jinja template.
        """
        self.source = source
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _now
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise TemplateFailed(f"the chat template does not compile: {error}") from error

    def render(self, messages: list[Message], *, tools: list[Any] | None = None) -> str:
        """Return the conversation as text, with the opening of the assistant's next turn.

        Raises:
            TemplateFailed: the template refuses it, or fails.
        """
        try:
            return self._template.render(
                messages=messages, tools=tools, documents=None, add_generation_prompt=True, **self._special_tokens
            )
        except Exception as error:  # the template is a program of the model's, which may raise anything
            raise TemplateFailed(f"the chat template fails: {error}") from error


def find(directory: Path, config: dict[str, Any]) -> str | None:
    """Return the template of a directory: chat_template.jinja, else that of tokenizer_config.json, else None."""
    file = directory / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _now(layout: str) -> str:
    return datetime.datetime.now().strftime(layout)
