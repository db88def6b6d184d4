"""From examples to prompts: the text that the model sees, its token ids, and the counts of the dataset's report.

One pass in batches; memory does not grow with the dataset but by eight bytes a row.
"""

from __future__ import annotations

import itertools
import re
from array import array
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import xxhash
from rlharvest.errors import InvalidField
from rlharvest.jobs.model import Dataset

from rlharvest_coordinator.data.messages import Message, with_system
from rlharvest_coordinator.data.rows import Row
from rlharvest_coordinator.data.shapes import Example, detect, extract
from rlharvest_coordinator.data.store import Writer
from rlharvest_coordinator.data.templates import TemplateFailed
from rlharvest_coordinator.data.tokenizer import Tokenizer

_BATCH = 256

Report = dict[str, Any]


class Prompts:
    """Makes prompts of one dataset with one tokenizer, and counts."""

    def __init__(self, dataset: Dataset, tokenizer: Tokenizer) -> None:
        self._dataset = dataset
        self._tokenizer = tokenizer
        self._special = re.compile("|".join(map(re.escape, tokenizer.special))) if tokenizer.special else None
        self._counts: Counter[str] = Counter()
        self._lengths = array("I")
        self._hashes = array("Q")

    def write(self, rows: Iterable[Row], writer: Writer, *, advance: Callable[[int], None]) -> Report:
        """Tokenise every row into `writer` and return the counts; `advance` is told how many rows are done.

        Raises:
            InvalidField: a row cannot be used, or none is left.
        """
        iterator = iter(rows)
        first = next(iterator, None)
        if first is None:
            raise InvalidField("dataset.path", self._dataset.path, "has no rows", "Name a file with at least one.")
        shape = detect(first.columns, self._dataset)
        columns: list[str] = []
        for batch in _batches(itertools.chain([first], iterator)):
            examples = [(row, extract(shape, row)) for row in batch]
            columns = columns or sorted(examples[0][1].columns)
            self._batch(examples, writer)
            advance(self._counts["rows"])
        return self._report(shape.format, columns)

    def _batch(self, examples: list[tuple[Row, Example]], writer: Writer) -> None:
        kept: list[tuple[Example, str, bool]] = []
        for row, example in examples:
            self._counts["rows"] += 1
            self._counts["turns"] += example.turns_dropped
            if _is_empty(example.prompt):
                self._counts["empty"] += 1
                continue
            text, rendered = self._text(row, example)
            self._hashes.append(xxhash.xxh3_64_intdigest(text.encode()))
            self._counts["special"] += bool(self._special and self._special.search(_own_text(example.prompt)))
            kept.append((example, text, rendered))
        with_template = iter(self._tokenizer.encode_rendered([text for _, text, rendered in kept if rendered]))
        without = iter(self._tokenizer.encode_plain([text for _, text, rendered in kept if not rendered]))
        for example, text, rendered in kept:
            self._add(example, text, next(with_template if rendered else without), writer)

    def _add(self, example: Example, text: str, ids: list[int], writer: Writer) -> None:
        if not ids:
            self._counts["empty"] += 1
        elif len(ids) > self._dataset.max_prompt_length:
            self._counts["too_long"] += 1
            self._counts["longest_dropped"] = max(self._counts["longest_dropped"], len(ids))
        else:
            self._lengths.append(len(ids))
            self._counts["truths"] += example.columns.get("ground_truth") is not None
            writer.add(ids, text, example.prompt, example.columns)

    def _text(self, row: Row, example: Example) -> tuple[str, bool]:
        """Return the text that the model sees, and whether a chat template wrote it."""
        system, prompt = self._dataset.system_prompt, example.prompt
        template = self._dataset.apply_chat_template
        if isinstance(prompt, str):
            if not template:
                return prompt if system is None else f"{system}\n\n{prompt}", False
            prompt = [{"role": "user", "content": prompt}]
        if template is False or self._tokenizer.template is None:
            raise _no_template(row, asked=template)
        tools = example.columns.get("tools")
        try:
            messages = with_system(prompt, system)
            return self._tokenizer.template.render(messages, tools=tools if isinstance(tools, list) else None), True
        except TemplateFailed as error:
            raise InvalidField(
                "dataset.path", row.where, str(error), "Correct this row's messages, or dataset.system_prompt."
            ) from error

    def _report(self, format: str, columns: list[str]) -> Report:
        counts = self._counts
        if not self._lengths:
            raise InvalidField(
                "dataset.max_prompt_length",
                self._dataset.max_prompt_length,
                f"no prompt is left of {counts['rows']} rows: {counts['too_long']} longer, {counts['empty']} empty",
                f"The longest has {counts['longest_dropped']} tokens."
                if counts["too_long"]
                else "Correct the dataset.",
            )
        lengths = np.frombuffer(self._lengths, dtype=np.uint32)
        return {
            "format": format,
            "rows": counts["rows"],
            "unique_prompts": len(np.unique(np.frombuffer(self._hashes, dtype=np.uint64))),
            "kept": len(lengths),
            "dropped": {"too_long": counts["too_long"], "empty": counts["empty"]},
            "tokens": {
                "min": int(lengths.min()),
                "median": float(np.median(lengths)),
                "max": int(lengths.max()),
                "total": int(lengths.sum(dtype=np.int64)),
            },
            "columns": columns,
            "rows_with_ground_truth": counts["truths"],
            "assistant_turns_dropped": counts["turns"],
            "rows_with_special_token_text": counts["special"],
        }


def _batches(rows: Iterable[Row]) -> Iterable[list[Row]]:
    iterator = iter(rows)
    while batch := list(itertools.islice(iterator, _BATCH)):
        yield batch


def _is_empty(prompt: str | list[Message]) -> bool:
    return not prompt.strip() if isinstance(prompt, str) else not any(message["content"].strip() for message in prompt)


def _own_text(prompt: str | list[Message]) -> str:
    return prompt if isinstance(prompt, str) else "\n".join(message["content"] for message in prompt)


def _no_template(row: Row, *, asked: bool | None) -> InvalidField:
    if asked is False:
        problem, first = "the prompt is a list of messages, which only a chat template renders", "Leave it unset"
    else:
        problem, first = "the model has no chat template to render messages with", "Use an instruct model"
    return InvalidField(
        "dataset.apply_chat_template",
        asked,
        f"{row.where}: {problem}",
        f"{first}, or set `tokenizer` to a directory that has chat_template.jinja, or use prompts that are strings "
        "(dataset.prompt_key).",
    )
