"""Values that every database and every JSON reader takes."""

from __future__ import annotations

import math
from typing import Any


def finite(value: Any) -> Any:
    """Return a JSON value in which NaN and infinities are None: JSON has no name for them, PostgreSQL refuses them."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return value


def storable(text: str) -> str:
    """Return text that PostgreSQL takes: U+0000 and lone surrogates become U+FFFD."""
    return text.replace("\0", "\N{REPLACEMENT CHARACTER}").encode("utf-8", "replace").decode() if text else text
