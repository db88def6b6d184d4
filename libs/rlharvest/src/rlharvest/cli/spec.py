"""From a job file to what the server gets: YAML, `--set`, and paths relative to the file made absolute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from rlharvest.errors import InvalidField
from rlharvest.jobs import aliases

MOST_BYTES = 4 << 20


def load(path: Path, settings: list[str] | None = None, *, absolute: bool = True) -> dict[str, Any]:
    """Return the job in a file.

    Args:
        settings: `a.b=c`, each put over what the file says; c is YAML. absolute: make relative paths absolute, as seen
        from the file's directory. False: leave them as they are written, for a
            server on another machine.

    Raises:
        InvalidField: the file, or a setting, cannot be used.
    """
    values = read(path, "job file", holds="one job", top="`model:`, `dataset:` and `rewards:`")
    for setting in settings or []:
        override(values, setting)
    values = aliases.apply(values)
    return from_directory(values, path.absolute().parent) if absolute else values


def read(path: Path, what: str, *, holds: str, top: str) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file.

    Args:
        what: names the file in errors. holds: what is in such a file. top: keys that people write at its top level.

    Raises:
        InvalidField: the file cannot be used.
    """
    try:
        if path.stat().st_size > MOST_BYTES:
            raise InvalidField(what, str(path), "is larger than 4 MiB", f"Give a YAML or JSON file with {holds}.")
        values = yaml.safe_load(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise InvalidField(what, str(path), str(error.strerror), "Name a YAML or JSON file.") from error
    except UnicodeDecodeError as error:
        raise InvalidField(what, str(path), "is not UTF-8 text", "Save it as UTF-8.") from error
    except yaml.YAMLError as error:
        raise InvalidField(what, str(path), f"is not YAML: {_where(error)}", "Fix that place.") from error
    except (
        ValueError,
        RecursionError,
    ) as error:  # a number of too many digits, a date that is none; brackets without end
        raise InvalidField(what, str(path), f"is not YAML: {error}", "Fix that place.") from error
    if not isinstance(values, dict):
        raise InvalidField(what, str(path), "holds no mapping", f"Write {top} at the top level.")
    return values


def override(values: dict[str, Any], setting: str) -> None:
    """Put `a.b.0.c=value` over a job in place; numbers are places in a list.

    Raises:
        InvalidField: it is not of that form, or the place does not exist in a list.
    """
    name, equals, text = setting.partition("=")
    if not equals or not all(name.split(".")):
        raise InvalidField("--set", setting, "not of the form a.b=value", "E.g. --set limits.max_steps=10")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidField("--set", setting, f"the value is not YAML: {_where(error)}", "Quote it.") from error
    except (ValueError, RecursionError) as error:
        raise InvalidField("--set", setting, f"the value is not YAML: {error}", "Quote it.") from error
    *parents, last = name.split(".")
    place: Any = values
    for parent in parents:
        place = _step(place, parent, setting)
    if isinstance(place, list):
        place[_index(place, last, setting)] = value
    else:
        place[last] = value


def from_directory(values: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return a job whose local paths are absolute. Hub names, `hf://` and `reasoning-gym:` stay as they are."""
    result = dict(values)
    for key in ("model", "tokenizer"):
        name = result.get(key)
        # `org/name` may be a directory or a name on a hub: only what is there, or says so, is a path.
        if isinstance(name, str) and "://" not in name:
            local = Path(name).expanduser()
            if name.startswith((".", "~")) or (directory / local).exists():
                result[key] = str((directory / local).resolve())
    dataset = result.get("dataset")
    if isinstance(dataset, dict) and isinstance(dataset.get("path"), str):
        path = dataset["path"]
        if "://" not in path and not path.startswith("reasoning-gym:"):
            result["dataset"] = {**dataset, "path": str((directory / Path(path).expanduser()).resolve())}
    rewards = result.get("rewards")
    if isinstance(rewards, list):
        result["rewards"] = [
            {**reward, "path": str((directory / Path(reward["path"]).expanduser()).resolve())}
            if isinstance(reward, dict) and isinstance(reward.get("path"), str)
            else reward
            for reward in rewards
        ]
    return result


def _step(place: Any, key: str, setting: str) -> Any:
    if isinstance(place, list):
        return place[_index(place, key, setting)]
    if place.get(key) is None:
        place[key] = {}
    inner = place[key]
    if not isinstance(inner, (dict, list)):
        raise InvalidField("--set", setting, f"{key} is {inner!r}, which has no fields", "Name a field of a block.")
    return inner


def _index(place: list[Any], key: str, setting: str) -> int:
    if not key.isdecimal() or int(key) >= len(place):
        raise InvalidField("--set", setting, f"{key!r} is no place in a list of {len(place)}", "Count from 0.")
    return int(key)


def _where(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    problem = getattr(error, "problem", None) or "malformed"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}" if mark else str(problem)
