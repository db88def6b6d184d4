"""JSON that every reader takes: NaN and infinities are null, nothing is escaped into ASCII."""

from __future__ import annotations

import json
from typing import Any

from starlette.responses import JSONResponse

from rlharvest_coordinator.store.values import finite


class StrictJSON(JSONResponse):
    """A JSON response (RFC 8259)."""

    def render(self, content: Any) -> bytes:
        text = json.dumps(finite(content), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        return text.encode("utf-8", "replace")
