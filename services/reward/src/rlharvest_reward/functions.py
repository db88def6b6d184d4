"""A reward function as the child process calls it: loaded from a file or built in, adapted to one sample.

Styles. TRL: `f(prompts=, completions=, completion_ids=, **columns) -> list[float | None]`, every value a list of one.
verl: `compute_score(data_source, solution_str, ground_truth, extra_info=None, **kw) -> float | {"score": float}`.
Either may be async. A function without **kwargs gets only the arguments it names.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import os
import sys
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from rlharvest_reward import builtin, values
from rlharvest_reward.fault import RewardFault, shorten, shown

Sample = dict[str, Any]
Style = Literal["trl", "verl"]

MODULE = "rlharvest_user_reward"

_WALLS = (
    "Reward code has no network, reads its libraries and the roots of jobs, writes only into its own folder, and may "
    "start a limited number of processes: see Security in docs/operations.md"
)

_RESERVED = ("prompts", "completions", "completion_ids", "trainer_state")


class Function:
    """One reward function, ready to score samples one at a time.

    Args:
        spec: `style`, `builtin` or `path` (resolved, absolute) and `name`, `params`, as in rlharvest.jobs.model.Reward.

    Raises:
        RewardFault: the file or the function does not exist, the import fails, or the style cannot be told.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        self.params: dict[str, Any] = spec["params"]
        self._runner = asyncio.Runner()
        self._score: Callable[[Sample], float | None]
        if spec["builtin"]:
            self.label = str(spec["builtin"])
            chosen = builtin.prepare(self.label, self.params)
            self._score = lambda sample: values.number(chosen(sample, **self.params), self.label)
            return
        path = Path(spec["path"])
        self.label = f"{path.name}:{spec['name']}"
        self.path = path
        self.function = load(path, spec["name"])
        self.parameters = inspect.signature(self.function).parameters
        style = spec["style"] if spec["style"] in ("trl", "verl") else style_of(self.function, self.label)
        self._score = self._trl if style == "trl" else self._verl

    def score(self, sample: Sample) -> float | None:
        """Return the reward of a sample, or None if the function says nothing about it.

        Raises:
            RewardFault: with what the function did instead.
        """
        try:
            return self._score(sample)
        except RewardFault:
            raise
        except MemoryError as error:
            raise RewardFault(
                "memory", f"{self.label} ran out of memory. Raise memory_mb, or use less", function=self.label
            ) from error
        except BaseException as error:
            raise RewardFault("exception", described(error, self.label), function=self.label) from error

    def _trl(self, sample: Sample) -> float | None:
        prompt = sample["prompt"]
        chat = isinstance(prompt, list)
        completion = [{"role": "assistant", "content": sample["completion"]}] if chat else sample["completion"]
        arguments: dict[str, Any] = {
            key: [column] for key, column in sample["columns"].items() if key not in _RESERVED
        } | self.params
        arguments |= {
            "prompts": [prompt],
            "completions": [completion],
            "completion_ids": [sample["completion_ids"]],
            "trainer_state": types.SimpleNamespace(global_step=sample["step"]),
        }
        return values.one_each(self._call(arguments), 1, self.label)[0]

    def _verl(self, sample: Sample) -> float | None:
        columns = sample["columns"]
        arguments = {
            "data_source": columns.get("data_source", ""),
            "solution_str": sample["completion"],
            "ground_truth": columns.get("ground_truth"),
            "extra_info": columns.get("extra_info"),
        } | self.params
        if arguments["ground_truth"] is None and "ground_truth" in self.parameters:
            builtin.ground_truths(sample, self.label)
        return values.verl_score(self._call(arguments), self.label)

    def _call(self, arguments: dict[str, Any]) -> Any:
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self.parameters.values()):
            arguments = {key: value for key, value in arguments.items() if key in self.parameters}
        result = self.function(**arguments)
        if inspect.isawaitable(result):

            async def awaited() -> Any:
                return await result

            return self._runner.run(awaited())
        return result


def load(path: Path, name: str) -> Callable[..., Any]:
    """Import a file and return its function.

    Files beside it can be imported by it. The import runs the user's code: only the child process may call this.
    """
    label = f"{path.name}:{name}"
    sys.path.append(os.fspath(path.parent))
    spec = importlib.util.spec_from_file_location(MODULE, path)
    if spec is None or spec.loader is None:
        raise RewardFault("not_found", f"{path.name} is no Python file; its name must end in .py", function=label)
    module = importlib.util.module_from_spec(spec)
    sys.modules[MODULE] = module
    try:
        spec.loader.exec_module(module)
    except FileNotFoundError as error:
        if error.filename != os.fspath(path):
            raise RewardFault("exception", f"importing {described(error, path.name)}", function=label) from error
        raise RewardFault("not_found", f"there is no file {path}", function=label) from error
    except MemoryError as error:
        raise RewardFault(
            "memory", f"importing {path.name} ran out of memory. Raise memory_mb", function=label
        ) from error
    except BaseException as error:
        raise RewardFault("exception", f"importing {described(error, path.name)}", function=label) from error
    function = getattr(module, name, None)
    if callable(function):
        return function  # type: ignore[no-any-return]  # a user's function has any type
    found = sorted(
        key
        for key, each in vars(module).items()
        if inspect.isfunction(each) and each.__module__ == MODULE and not key.startswith("_")
    )
    problem = f"there is no function {name!r}" if function is None else f"{name!r} is not a function"
    raise RewardFault(
        "not_found",
        f"{path.name}: {problem}; found {', '.join(found) or 'none'}. Set `name` of the reward to one of them",
        function=label,
    )


def style_of(function: Callable[..., Any], label: str) -> Style:
    """Return the style that a function's parameters show."""
    parameters = inspect.signature(function).parameters
    if "solution_str" in parameters:
        return "verl"
    if "completions" in parameters:
        return "trl"
    raise RewardFault(
        "wrong_type",
        f"{label} has the parameters ({', '.join(parameters)}); expected `completions` (TRL) or `solution_str` (verl). "
        "Rename them, or set `style` of the reward to trl or verl",
        function=label,
    )


def described(error: BaseException, label: str) -> str:
    """Return one paragraph about an exception: its type, its text and the user's last frames."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<frozen") and Path(frame.filename).parent != Path(__file__).parent
    ]
    if isinstance(error, SyntaxError):
        where = f" (line {error.lineno}: {(error.text or '').strip()})"
    else:
        where = "".join(
            f"\n  {Path(frame.filename).name}:{frame.lineno} in {frame.name}: {frame.line or ''}"
            for frame in frames[-4:]
        )
    try:
        text = shorten(str(error), 800)
    except Exception:  # noqa: BLE001 - the text of the exception is code of the user's
        text = shown(error)
    hint = ". " + _WALLS if isinstance(error, PermissionError | BlockingIOError) else ""
    return f"{label} raised {type(error).__name__}: {text}{hint}{where}"
