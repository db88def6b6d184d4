"""The rewards of a job, looked at before the job runs: the files exist, and have the functions that are named.

Files are parsed, never run: they belong to the reward service's own processes. The digest covers the rewards block
and the content of the files, so a changed file is another reward.
"""

from __future__ import annotations

import ast
import difflib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import blake3
from rlharvest import confinement
from rlharvest.errors import CorruptData, InvalidField
from rlharvest.jobs.model import Reward

from rlharvest_coordinator.data.paths import confine

MOST_BYTES = 4 << 20


def check(rewards: Sequence[Reward], *, roots: Sequence[Path], has_truth: bool, columns: Sequence[str]) -> str:
    """Check each reward and return the digest of all: 64 hexadecimal digits.

    Args:
        has_truth: whether the dataset's rows have a right answer.
        columns: what rewards get of a row, for the message.

    Raises:
        InvalidField: `rewards.<i>.path` or `rewards.<i>.name` cannot be used; `dataset.label_key` is needed.
    """
    hasher = blake3.blake3(json.dumps([reward.model_dump(mode="json") for reward in rewards], sort_keys=True).encode())
    for number, reward in enumerate(rewards):
        if reward.path is not None:
            hasher.update(b"\0" + _file(f"rewards.{number}", reward, roots))
        elif reward.builtin in ("exact_match", "numeric") and not has_truth:
            raise InvalidField(
                "dataset.label_key",
                None,
                f"rewards.{number} is {reward.builtin}, which compares with the right answer, and the rows have none; "
                f"found [{', '.join(columns)}]",
                "Set dataset.label_key to the column that holds it.",
            )
        elif reward.builtin == "reasoning_gym" and "entry" not in columns:
            raise InvalidField(
                f"rewards.{number}.builtin",
                reward.builtin,
                f"its verifier needs the generated entry, and the rows have none; found [{', '.join(columns)}]",
                "Use a dataset.path of reasoning-gym:<task>, or another reward.",
            )
    return hasher.hexdigest()


def _file(field: str, reward: Reward, roots: Sequence[Path]) -> bytes:
    path = confine(f"{field}.path", reward.path or "", roots)
    if not path.is_file() or path.suffix != ".py":
        raise InvalidField(f"{field}.path", reward.path, "is no Python file", "Name a .py file.")
    if path.stat().st_size > MOST_BYTES:
        raise InvalidField(f"{field}.path", reward.path, f"is larger than {MOST_BYTES} bytes", "Split it.")
    try:
        content = confinement.read(path, roots, most=MOST_BYTES)
    except CorruptData as error:
        raise InvalidField(f"{field}.path", reward.path, str(error), "Leave the file as it is.") from error
    try:
        names = list(_names(ast.parse(content, filename=path.name)))
    except (SyntaxError, ValueError, RecursionError) as error:
        raise InvalidField(f"{field}.path", reward.path, f"is not Python ({error})", "Correct the file.") from error
    if reward.name not in names:
        near = difflib.get_close_matches(reward.name, names, n=1) or names
        raise InvalidField(
            f"{field}.name",
            reward.name,
            f"{path.name} has no such function; found [{', '.join(names)}]",
            f"Set name: {near[0]}." if near else "Define it at the top level of the file.",
        )
    return content


def _names(tree: ast.Module) -> Iterator[str]:
    """Yield what a module's top level can call: its functions, then names that it imports or assigns."""
    yield from (node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef))
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from (target.id for target in node.targets if isinstance(target, ast.Name))
