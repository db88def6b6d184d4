"""Chat templates render as the transformers library renders them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rlharvest_coordinator.data.templates import ChatTemplate, TemplateFailed, find
from transformers.utils.chat_template_utils import render_jinja_template

MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " 2 < 3 & 日本 <|im_end|> "},
    {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {"ü": [1, None]}}}]},
    {"role": "tool", "content": "5"},
    {"role": "user", "content": "why?"},
]
TEMPLATES = [
    "{%- for m in messages %}\n  {%- if m.role == 'system' %}\n{{ '<s>' + m.content }}\n  {%- endif %}\n{%- endfor %}",
    "{% for m in messages %}\n  {% if loop.index0 == 2 %}{% continue %}{% endif %}\n"
    "{{ m['role'] }}: {{ m['content'] | trim }}\n{% endfor %}\n",
    "{{ bos_token }}{% for m in messages %}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function | tojson }}{% endif %}{% endfor %}",
    "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}"
    "{% if loop.index > 3 %}{% break %}{% endif %}{% endfor %}",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}"
    "{{ ns.n }}{{ tools is none }}",
    "{{ messages | map(attribute='content') | join('|') }}"
    "{% if add_generation_prompt %}>{% endif %}{{ strftime_now('%Y') }}",
    "{{ messages[2] | tojson(indent=2) }}{% if tools %}{{ tools | tojson }}{% endif %}",
]


@pytest.mark.parametrize("source", TEMPLATES)
@pytest.mark.parametrize("tools", [None, [{"type": "function", "function": {"name": "ä"}}]])
def test_rendering_equals_that_of_transformers(source: str, tools: Any) -> None:
    expected, _ = render_jinja_template(
        [MESSAGES], tools=tools, chat_template=source, add_generation_prompt=True, bos_token="<s>"
    )
    assert ChatTemplate(source, {"bos_token": "<s>"}).render(MESSAGES, tools=tools) == expected[0]


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('roles must alternate') }}",
        "{{ messages[0].content + 5 }}",
        "{{ messages.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__subclasses__() }}",
        "{% for i in range(10000000000) %}x{% endfor %}",
        "{{ nothing.at.all }}",
    ],
)
def test_a_template_that_refuses_fails_or_reaches_out_is_an_error(source: str) -> None:
    with pytest.raises(TemplateFailed, match="the chat template fails"):
        ChatTemplate(source, {}).render(MESSAGES)


def test_a_template_that_does_not_compile_is_an_error() -> None:
    with pytest.raises(TemplateFailed, match="does not compile"):
        ChatTemplate("{% for %}", {})


def test_a_file_comes_before_the_configuration(tmp_path: Path) -> None:
    assert find(tmp_path, {}) is None
    assert find(tmp_path, {"chat_template": "a"}) == "a"
    named = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    assert find(tmp_path, {"chat_template": named}) == "d"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert find(tmp_path, {"chat_template": "a"}) == "file"
