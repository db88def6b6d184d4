"""Rows made by a generator of `reasoning-gym`: procedural tasks with exact verifiers, which need no download.

A generator is fully determined by its task, its parameters, its seed and its size; `fingerprint` covers those and the
version of the package.
"""

from __future__ import annotations

import difflib
import importlib.metadata
from typing import Any

from rlharvest.errors import InvalidField

from rlharvest_coordinator.data.rows import Row, Rows, plain

PREFIX = "reasoning-gym:"
DEFAULT_SIZE = 1000


def read(task: str, params: dict[str, Any], *, seed: int, size: int) -> Rows:
    """Yield `size` rows with columns prompt, ground_truth, task and entry (all that the verifier needs).

    Raises:
        InvalidField: there is no such task (`dataset.path`), or the task refuses its parameters (`dataset.params`).
    """
    # Imported here: the package takes seconds to import, which every restart of a coordinator would pay.
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if task not in DATASETS:
        near = difflib.get_close_matches(task, DATASETS, n=3)
        hint = f"Did you mean {', '.join(near)}?" if near else f"Tasks: {', '.join(sorted(DATASETS))}."
        raise InvalidField("dataset.path", PREFIX + task, f"reasoning-gym has no task {task!r}", hint)
    settings = {"seed": seed % 2**31, **params, "size": size}
    try:
        dataset = reasoning_gym.create_dataset(task, **settings)
        for index in range(size):
            yield _row(task, index, dataset[index])
    except InvalidField:
        raise
    except Exception as error:  # a generator raises anything when its parameters do not go together
        raise InvalidField(
            "dataset.params", params, f"task {task!r} fails with them ({error!r})", "Use parameters that this task has."
        ) from error


def _row(task: str, index: int, entry: dict[str, Any]) -> Row:
    where = f"{PREFIX}{task}, row {index}"
    columns = {
        "prompt": entry["question"],
        "ground_truth": entry["answer"],
        "task": task,
        "entry": plain(entry, where, "entry"),
    }
    return Row(where, columns)


def fingerprint(task: str, params: dict[str, Any], *, seed: int, size: int) -> str:
    """Return what the rows depend on, as one line."""
    version = importlib.metadata.version("reasoning_gym")
    return f"{PREFIX}{task} {sorted(params.items())!r} seed={seed} size={size} reasoning_gym={version}"
