"""What went wrong in scoring one response, and how much of it is shown.

The module is imported by the child processes too, so it stays light.
"""

from __future__ import annotations

import json
from typing import Any, Literal, get_args

from rlharvest.errors import DataError

Kind = Literal[
    "exception",
    "timeout",
    "memory",
    "none",
    "not_finite",
    "wrong_length",
    "wrong_type",
    "crashed",
    "not_found",
]

KINDS: frozenset[str] = frozenset(get_args(Kind))

MAX_MESSAGE = 2_000
MAX_SAMPLE = 2_000
MAX_FIELD = 400


class RewardFault(DataError):
    """A reward function gave no usable number.

    Attributes:
        kind: one of KINDS.
        function: the function as the user knows it, e.g. `rewards.py:compute_score`.
    """

    def __init__(self, kind: Kind, message: str, *, function: str = "") -> None:
        self.kind: Kind = kind
        self.function = function
        super().__init__(shorten(message, MAX_MESSAGE))


def shorten(text: str, most: int) -> str:
    """Return valid Unicode of at most `most` characters; what is cut from the middle is counted."""
    text = text.encode("utf-8", "replace").decode("utf-8")
    if len(text) <= most:
        return text
    note = f" … [{len(text) - most} characters more] … "
    keep = max(most - len(note), 2)
    return text[: keep - keep // 3] + note + text[len(text) - keep // 3 :]


def shown(value: object, most: int = 120) -> str:
    """Return the repr of a value, shortened; a repr that fails is named as such."""
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - the repr is code of the user's
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return shorten(text, most)


def sample_json(sample: dict[str, Any]) -> str:
    """Return a sample as JSON of at most MAX_SAMPLE characters, every long field shortened on its own."""
    columns = sample.get("columns", {})
    view: dict[str, Any] = {
        "completion": shorten(sample["completion"], MAX_FIELD),
        "prompt": shorten(sample["prompt_text"], MAX_FIELD),
        "columns": {
            shorten(key, 60): shorten(json.dumps(value, ensure_ascii=False), MAX_FIELD // 4)
            for key, value in list(columns.items())[:8]
        },
        "completion_tokens": len(sample["completion_ids"]),
        "truncated": sample["truncated"],
    }
    return shorten(json.dumps(view, ensure_ascii=False), MAX_SAMPLE)
