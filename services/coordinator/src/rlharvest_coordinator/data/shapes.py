"""What a row means: which column is the prompt, which is the right answer, and what rewards get.

Detection is a pure function of the column names, and its result is the same for any order of them. Formats:

- verl: `prompt`, `reward_model` or `reward_spec` with `ground_truth` in it, usually `data_source` and `extra_info`;
- trl: `prompt`, and any other columns, which rewards get by name;
- messages: `messages` as OpenAI has them; the assistant's turns at the end are not part of the prompt;
- question-answer: `question`, `problem`, `instruction` or `input`, with `answer`, `solution`, `output` or `label`.

Rewards get every column but the prompt, and the right answer as `ground_truth`. In question-answer data the answer is
cut out of a worked solution: what follows the last `####`, without commas between thousands (GSM8K), else what the
last `\\boxed{}` holds (MATH). The column itself is left as it is. With `label_key` the value is taken as it is.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Literal

from rlharvest.errors import InvalidField
from rlharvest.jobs.model import Dataset

from rlharvest_coordinator.data.messages import BadMessages, Message, normalise, without_answer
from rlharvest_coordinator.data.rows import Row

Format = Literal["verl", "trl", "messages", "question-answer", "keys"]

_TRUTH = "ground_truth"
_REWARD_MODELS = ("reward_model", "reward_spec")
_LABELS = (_TRUTH, "answer", "solution", "label", "target")
_QUESTIONS = ("question", "problem", "instruction", "input")
_ANSWERS = ("answer", "solution", "output", "label", _TRUTH)
_THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(?!\d))")


@dataclass(frozen=True, slots=True)
class Shape:
    """How rows are read."""

    format: Format
    prompt: str
    """Column of the prompt."""
    label: str | None = None
    """Column of the right answer; in verl data a struct with `ground_truth`. None: there is none."""
    context: str | None = None
    """Column that is appended to the prompt where it is not empty (Alpaca's `input`)."""
    required_label: bool = False
    """Whether a row without an answer is refused."""


@dataclass(frozen=True, slots=True)
class Example:
    """What one row gives."""

    prompt: str | list[Message]
    columns: dict[str, Any]
    """What rewards get, `ground_truth` among it if there is one."""
    turns_dropped: int = 0
    """Assistant's turns at the end that were left out of the prompt."""


def detect(columns: Collection[str], dataset: Dataset) -> Shape:
    """Return the shape of rows with these columns.

    Raises:
        InvalidField: no prompt column, or not a dataset of prompts; names the columns found and the key to set.
    """
    for field, key in (("dataset.prompt_key", dataset.prompt_key), ("dataset.label_key", dataset.label_key)):
        if key is not None and key not in columns:
            raise InvalidField(field, key, f"row 0: no column {key!r}; found {_list(columns)}", "Name one of these.")
    if dataset.prompt_key is not None:
        return Shape("keys", dataset.prompt_key, dataset.label_key, required_label=dataset.label_key is not None)
    shape = _by_format(columns, dataset.format)
    if dataset.label_key is not None:
        return Shape("keys", shape.prompt, dataset.label_key, shape.context, required_label=True)
    return shape


def extract(shape: Shape, row: Row) -> Example:
    """Return prompt and columns of a row.

    Raises:
        InvalidField: a column is missing or of the wrong type; names the row, what was found and what was wanted.
    """
    if shape.prompt not in row.columns:
        raise _missing(row, shape.prompt, "prompt_key")
    columns = {name: value for name, value in row.columns.items() if name != shape.prompt}
    prompt = row.columns[shape.prompt]
    turns: list[Message] = []
    if isinstance(prompt, list):
        prompt, turns = _conversation(shape, row, prompt)
    elif not isinstance(prompt, str):
        raise _wrong(row, shape.prompt, prompt, "a string or a list of messages")
    elif shape.context is not None and row.columns.get(shape.context):
        prompt = f"{prompt}\n\n{row.columns[shape.context]}"
    if (truth := _truth(shape, row)) is not None:
        columns[_TRUTH] = truth
    elif turns and _TRUTH not in columns:
        columns[_TRUTH] = turns[-1]["content"]
    return Example(prompt, columns, len(turns))


def final_answer(text: str) -> str:
    """Return what a worked solution ends with: after the last `####`, else in the last `\\boxed{}`, else all."""
    if "####" in text:
        return _THOUSANDS.sub("", text.rpartition("####")[2].strip())
    start = text.rfind("\\boxed{")
    if start < 0:
        return text.strip()
    start += len("\\boxed{")
    depth = 1
    for place in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[place], 0)
        if depth == 0:
            return text[start:place].strip()
    return text.strip()


def _by_format(columns: Collection[str], wanted: str) -> Shape:
    model = _first(_REWARD_MODELS, columns)
    if wanted == "verl" or (wanted == "auto" and "prompt" in columns and model is not None):
        _need(columns, "prompt", "prompt_key")
        if model is None:
            raise _absent(columns, "reward_model", "label_key")
        return Shape("verl", "prompt", model, required_label=True)
    if wanted == "auto":
        _refuse_others(columns)
    if wanted == "trl" or (wanted == "auto" and "prompt" in columns):
        _need(columns, "prompt", "prompt_key")
        return Shape("trl", "prompt", _first(_LABELS, columns))
    if wanted == "messages" or (wanted == "auto" and "messages" in columns):
        _need(columns, "messages", "prompt_key")
        return Shape("messages", "messages", _first(_LABELS, columns))
    question = _first(_QUESTIONS, columns)
    answer = _first(_ANSWERS, columns)
    if question is None:
        raise _absent(columns, "prompt" if wanted == "auto" else "question", "prompt_key")
    if answer is None:
        raise _absent(columns, "answer", "label_key")
    context = "input" if question == "instruction" and "input" in columns else None
    return Shape("question-answer", question, answer, context, required_label=True)


def _refuse_others(columns: Collection[str]) -> None:
    if {"chosen", "rejected"} <= set(columns):
        kind, fix = "pairs of preferences", "To train on its prompts alone, set dataset.prompt_key."
    elif "prompt" in columns and "completion" in columns:
        kind, fix = (
            "prompts with completions, for supervised training",
            "To use its prompts, set dataset.prompt_key: prompt.",
        )
    elif "conversations" in columns:
        kind, fix = "ShareGPT conversations", "Rename conversations/from/value to messages/role/content."
    elif set(columns) == {"text"}:
        kind, fix = "plain text", "If each text is a prompt, set dataset.prompt_key: text."
    else:
        return
    raise InvalidField("dataset.path", _list(columns), f"not a prompt dataset: these are {kind}", fix)


def _conversation(shape: Shape, row: Row, prompt: list[Any]) -> tuple[list[Message], list[Message]]:
    try:
        messages, turns = without_answer(normalise(prompt))
    except BadMessages as error:
        raise InvalidField(
            "dataset.path", row.where, f"column {shape.prompt!r}: {error}", "Correct this row."
        ) from error
    if turns and shape.format in ("verl", "trl"):
        raise InvalidField(
            "dataset.path",
            row.where,
            f"column {shape.prompt!r} ends with an assistant's turn, so there is nothing to answer",
            "Remove that turn, or set dataset.format: messages for data under `messages`.",
        )
    if prompt and not messages:
        raise InvalidField(
            "dataset.path", row.where, f"column {shape.prompt!r} holds only assistant's turns", "Correct this row."
        )
    return messages, turns


def _truth(shape: Shape, row: Row) -> Any:
    """Return the right answer: text for a text or a number, lists and objects as they are, None if there is none."""
    if shape.label is None:
        return None
    if shape.label not in row.columns:
        raise _missing(row, shape.label, "label_key")
    value = row.columns[shape.label]
    if shape.format == "verl":
        if not isinstance(value, dict) or _TRUTH not in value:
            found = sorted(value) if isinstance(value, dict) else type(value).__name__
            raise InvalidField(
                "dataset.path",
                row.where,
                f"column {shape.label!r} has no {_TRUTH!r}; found {found}",
                "Add it, or set dataset.prompt_key and dataset.label_key.",
            )
        value = value[_TRUTH]
    if value is None and shape.required_label:
        raise _wrong(row, shape.label, None, "the right answer")
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    if isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if isinstance(value, str) and shape.format == "question-answer":
        return final_answer(value)
    return value


def _first(names: Collection[str], columns: Collection[str]) -> str | None:
    return next((name for name in names if name in columns), None)


def _list(columns: Collection[str]) -> str:
    return "[" + ", ".join(sorted(columns)) + "]"


def _need(columns: Collection[str], column: str, key: str) -> None:
    if column not in columns:
        raise _absent(columns, column, key)


def _absent(columns: Collection[str], column: str, key: str) -> InvalidField:
    return InvalidField(
        f"dataset.{key}",
        None,
        f"row 0: no column {column!r}; found {_list(columns)}",
        f"Set dataset.{key} to the right one of these.",
    )


def _missing(row: Row, column: str, key: str) -> InvalidField:
    return InvalidField(
        "dataset.path",
        row.where,
        f"no column {column!r}, which the rows before have; found {_list(row.columns)}",
        f"Correct this row, or set dataset.{key}.",
    )


def _wrong(row: Row, column: str, value: Any, wanted: str) -> InvalidField:
    kind = "null" if value is None else type(value).__name__
    return InvalidField("dataset.path", row.where, f"column {column!r} is {kind}; wanted {wanted}", "Correct this row.")
