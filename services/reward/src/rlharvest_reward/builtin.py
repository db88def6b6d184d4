"""The reward functions that come with rlharvest. Each takes a sample and the reward's `params`, and returns 0.0 to 1.0.

They run in child processes like a user's own, so they set no time limits of their own (one that is made with signals
would not fire outside of a main thread anyway). What a sample lacks is a RewardFault, never a zero.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

from rlharvest_reward import answers
from rlharvest_reward.fault import RewardFault, shown

Sample = dict[str, Any]
Builtin = Callable[..., float]

MAX_EXPRESSION = 2_000

_THINK_END = "</think>"
_ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def ground_truths(sample: Sample, function: str) -> list[str]:
    """Return the accepted answers of a sample: its column `ground_truth`, one or a list of them."""
    column = sample["columns"].get("ground_truth")
    if column is None or column == []:
        raise RewardFault(
            "not_found",
            f"{function} needs the column 'ground_truth'; this row has {sorted(sample['columns'])}. "
            "Set dataset.label_key to the column of the right answer",
            function=function,
        )
    return [str(item) for item in (column if isinstance(column, list) else [column])]


def exact_match(sample: Sample, *, ignore_case: bool = False) -> float:
    """1.0 if the completion is the ground truth, white space at both ends aside."""

    def normal(text: str) -> str:
        return text.strip().casefold() if ignore_case else text.strip()

    completion = normal(sample["completion"])
    return float(any(completion == normal(truth) for truth in ground_truths(sample, "exact_match")))


def regex(sample: Sample, *, pattern: str) -> float:
    """1.0 if the pattern (Python `re`) is found in the completion."""
    return float(re.search(pattern, sample["completion"]) is not None)


def numeric(sample: Sample, *, tolerance: float = 0.0) -> float:
    """1.0 if the completion's final answer equals the ground truth, as a number or as a mathematical expression.

    Numbers are compared exactly (rlharvest_reward.answers) unless `tolerance`, a relative difference, is given; what is
    no number on either side goes through math-verify. Text before `</think>` is not searched; an expression is looked for
    in the last MAX_EXPRESSION characters only.
    """
    completion = sample["completion"].rpartition(_THINK_END)[2]
    answer = answers.marked(completion)
    return float(any(_same(answer, completion, truth, tolerance) for truth in ground_truths(sample, "numeric")))


def _same(answer: str | None, completion: str, truth: str, tolerance: float) -> bool:
    expected_text = truth if answers.value(truth) is not None else (answers.marked(truth) or truth)
    expected = answers.value(expected_text)
    if expected is not None:
        candidate = answer if answer is not None else answers.last_number(completion)
        if candidate is None:
            return False
        found = answers.value(candidate)
        if found is not None:
            return answers.equal(found, expected, tolerance)
    if answer is not None and _bare(answer) == _bare(expected_text):
        return True
    return _symbolic(answer if answer is not None else completion, expected_text, boxed=answer is not None)


def _bare(text: str) -> str:
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf|mbox)\s*\{([^{}]*)\}", r"\1", answers.plain(text))
    return re.sub(r"[\s$().*]", "", text).casefold()


def _symbolic(answer: str, expected: str, *, boxed: bool) -> bool:
    # math-verify brings sympy; `prepare` has imported it before the first call.
    from math_verify import parse, verify

    def expressions(text: str, wrap: bool) -> Any:
        return parse(f"$\\boxed{{{text}}}$" if wrap else text, parsing_timeout=0)

    gold = expressions(expected, True)
    found = expressions(answer[-MAX_EXPRESSION:], boxed)
    return bool(gold) and bool(verify(gold, found, timeout_seconds=0))


def reasoning_gym(sample: Sample, *, task: str = "") -> float:
    """The score that the reasoning-gym task gives to the answer.

    The answer is what stands in the last <answer>…</answer>, else the whole completion without white space at its ends.
    The row's columns hold `entry` (the generated entry, an object or its JSON) and `task`, unless `params.task` is set.
    """
    from reasoning_gym import get_score_answer_fn

    columns = sample["columns"]
    task = task or str(columns.get("task") or "")
    entry = columns.get("entry")
    if not task or entry is None:
        raise RewardFault(
            "not_found",
            f"reasoning_gym needs the columns 'entry' and 'task' (or params.task); this row has {sorted(columns)}. "
            "Use dataset.path: reasoning-gym:<task>",
            function="reasoning_gym",
        )
    if isinstance(entry, str):
        entry = json.loads(entry)
    try:
        score = get_score_answer_fn(task)
    except ValueError as error:
        raise RewardFault(
            "not_found",
            f"reasoning_gym has no task {task!r}. Set params.task to one of its tasks",
            function="reasoning_gym",
        ) from error
    tagged = _ANSWER_TAG.findall(sample["completion"])
    return float(score(answer=(tagged[-1] if tagged else sample["completion"]).strip(), entry=entry))


BUILTINS: dict[str, Builtin] = {
    "exact_match": exact_match,
    "numeric": numeric,
    "regex": regex,
    "reasoning_gym": reasoning_gym,
}


def prepare(name: str, params: dict[str, Any]) -> Builtin:
    """Return a built-in function, its heavy imports done and its params checked.

    Raises:
        RewardFault: there is no such function, or params it does not know.
    """
    function = BUILTINS.get(name)
    if function is None:
        raise RewardFault("not_found", f"no built-in reward {name!r}; there are {', '.join(BUILTINS)}", function=name)
    known = [key for key in inspect.signature(function).parameters if key != "sample"]
    unknown = sorted(set(params) - set(known))
    if unknown:
        raise RewardFault(
            "wrong_type", f"{name} does not know params {unknown}; it knows {known or 'none'}", function=name
        )
    if name == "regex":
        pattern = params.get("pattern")
        try:
            re.compile(str(pattern))
        except re.error as error:
            raise RewardFault(
                "wrong_type",
                f"regex: params.pattern = {shown(pattern)} is not a regular expression: {error}",
                function=name,
            ) from error
    elif name == "numeric":
        import math_verify  # noqa: F401 - paid once, before the first call's time runs
    elif name == "reasoning_gym":
        import reasoning_gym as _  # noqa: F401 - as above
    return function
