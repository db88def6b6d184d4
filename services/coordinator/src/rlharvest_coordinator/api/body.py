"""Bodies of requests that create something: JSON or YAML, one mapping."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import yaml
from rlharvest.errors import InvalidField
from starlette.exceptions import HTTPException
from starlette.requests import Request

_YAML = ("application/yaml", "application/x-yaml", "text/yaml", "text/x-yaml")


async def mapping(request: Request, *, yaml_too: bool = False) -> dict[str, Any]:
    """Return the body of a request.

    Raises:
        InvalidField: it does not parse, with line and column; or it is not a mapping.
        HTTPException: 415, it is of another type.
    """
    kind = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    data = await request.body()
    if kind == "application/json":
        value = _json(data)
    elif yaml_too and kind in _YAML:
        value = await asyncio.to_thread(_yaml, data)  # seconds for a megabyte: nobody else waits for it
    else:
        allowed = "application/json or application/yaml" if yaml_too else "application/json"
        raise HTTPException(415, f"Content-Type {kind!r} is not read here. Send {allowed}.")
    if not isinstance(value, dict):
        raise InvalidField("body", value, "not a mapping", "Send an object with the fields at its top level.")
    return value


def _json(data: bytes) -> Any:
    try:
        return json.loads(data, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        where = f"line {error.lineno}, column {error.colno}"
        raise InvalidField("body", data[:80], f"not JSON: {error.msg} at {where}", "Send a JSON object.") from error
    except (UnicodeDecodeError, RecursionError, ValueError) as error:  # a number of thousands of digits, last
        raise InvalidField("body", data[:80], f"not JSON: {error}", "Send a JSON object in UTF-8.") from error


def _no_constant(name: str) -> Any:
    raise InvalidField("body", name, "not a JSON number", "Send a finite number, or leave the field out.")


def _yaml(data: bytes) -> Any:
    try:
        return yaml.load(data.decode("utf-8"), _NoAlias)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        message = " ".join(str(error).split())
        raise InvalidField("body", data[:80], f"not YAML: {message}", "Send a YAML mapping in UTF-8.") from error


class _NoAlias(yaml.SafeLoader):
    """Refuses `*alias`: a few of them make a small text a huge value."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError(f"an alias at line {self.line + 1}; write the value out")
        return super().compose_node(parent, index)
