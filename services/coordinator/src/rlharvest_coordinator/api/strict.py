"""JSON that every reader takes: NaN and infinities are null, nothing is escaped into ASCII."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from rlharvest_coordinator.store.values import finite


class StrictJSON(JSONResponse):
    """A JSON response (RFC 8259)."""

    def render(self, content: Any) -> bytes:
        return text_of(content).encode("utf-8", "replace")


def text_of(content: Any) -> str:
    """Return a value as JSON."""
    return json.dumps(finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
