"""What pydantic models say of their fields, as Markdown: type, default, bounds, and the docstring under each field.

Invariant: the text depends on the source of the models alone, not on this machine or its environment, so that a committed
reference can be compared with it.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

_BOUNDS = {
    "ge": "≥ {}",
    "gt": "> {}",
    "le": "≤ {}",
    "lt": "< {}",
    "min_length": "length ≥ {}",
    "max_length": "length ≤ {}",
}
_WORDS = {
    "str": "text",
    "int": "integer",
    "float": "number",
    "bool": "true or false",
    "Any": "anything",
    "Path": "path",
}


@dataclass(frozen=True, slots=True)
class FieldText:
    """One field, in words."""

    name: str
    kind: str
    """Its type."""
    default: str
    """Empty: the field is required."""
    bounds: str
    meaning: str
    block: type[BaseModel] | None
    """The model that the field holds, or a list of."""


def of(model: type[BaseModel], computed: Mapping[str, str]) -> Iterator[FieldText]:
    """Yield the fields of a model in the order of their definition.

    Args:
        computed: what to show as default of fields whose default is computed on the machine, by name.

    Raises:
        KeyError: such a field is not in `computed`.
    """
    meanings = docstrings(model)
    for name, info in model.model_fields.items():
        yield FieldText(
            name=name,
            kind=_type(info.annotation),
            default=_default(info, computed.get(name)),
            bounds=", ".join(_bounds(info)),
            meaning=" ".join(meanings.get(name, "").split()),
            block=_block(info.annotation),
        )


def docstrings(model: type[BaseModel]) -> dict[str, str]:
    """Return the docstring under each field, those of the bases included."""
    found: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if not issubclass(base, BaseModel) or base.__module__.partition(".")[0].startswith("pydantic"):
            continue
        (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(body, ast.ClassDef)
        for field, text in zip(body.body, body.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[field.target.id] = inspect.cleandoc(str(text.value.value))
    return found


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table."""
    lines = [header, ["---" for _ in header], *rows]
    return "".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |\n" for line in lines)


def _type(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type(arguments[0])
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (Union, types.UnionType):
        return " or ".join(_type(each) for each in arguments if each is not type(None))
    if origin in (list, tuple):
        return f"list of {_type(arguments[0])}"
    if origin is dict:
        return "mapping"
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return "block"
    name = getattr(annotation, "__name__", str(annotation))
    return "secret text" if name in ("SecretStr", "Tokens") else _WORDS.get(name, name)


def _default(info: FieldInfo, computed: str | None) -> str:
    if computed is not None:
        return computed
    if info.default_factory in (list, dict):
        return "none"
    if info.default_factory is not None:
        raise KeyError(f"the default of {info.title or info.annotation} is computed: say what it is")
    return "" if info.default is PydanticUndefined else _shown(info.default)


def _shown(value: Any) -> str:
    if value is None:
        return "unset"
    if isinstance(value, bool):
        return "`true`" if value else "`false`"
    if isinstance(value, BaseModel):
        return "its defaults"
    if isinstance(value, (tuple, list, dict)) and not value:
        return "none"
    if isinstance(value, Enum):
        return f"`{value.value}`"
    if isinstance(value, Path):
        return f"`{value.as_posix()}`"
    if value == "":
        return "empty"
    return f"`{_number(value) if isinstance(value, int | float) else value}`"


def _bounds(info: FieldInfo) -> Iterator[str]:
    metadata = list(info.metadata)
    for part in _flat(info.annotation):
        metadata += [each for extra in part for each in getattr(extra, "metadata", [extra])]
    for item in metadata:
        for name, text in _BOUNDS.items():
            if (bound := getattr(item, name, None)) is not None:
                yield text.format(_number(bound))


def _flat(annotation: Any) -> Iterator[tuple[Any, ...]]:
    if get_origin(annotation) is Annotated:
        yield annotation.__metadata__
    elif get_origin(annotation) in (Union, types.UnionType):
        for each in get_args(annotation):
            yield from _flat(each)


def _number(value: float) -> str:
    if isinstance(value, int) and value >= 1 << 16 and value & (value - 1) == 0:
        return f"2^{value.bit_length() - 1}"
    return str(value)


def _block(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for each in get_args(annotation):
        if (found := _block(each)) is not None:
            return found
    return None
