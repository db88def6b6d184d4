"""Print the OpenAPI description: `python -m rlharvest_coordinator.api.openapi > docs/openapi.json`."""

from __future__ import annotations

import json
import sys

from rlharvest_coordinator.api.app import describe


def text() -> str:
    """Return the description as it is committed."""
    return json.dumps(describe(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(text())
