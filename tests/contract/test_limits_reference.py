"""docs/limits.md says what the code bounds, and every limit of it is reached by a test."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "limits.py"))
LIMITS = [limit for _, limits in REFERENCE["SECTIONS"] for limit in limits]


def test_the_page_is_fresh() -> None:
    advice = "run: python docs/limits.py > docs/limits.md"
    assert (ROOT / "docs" / "limits.md").read_text(encoding="utf-8") == REFERENCE["text"](), advice


@pytest.mark.parametrize("limit", LIMITS, ids=lambda limit: limit.what)
def test_a_test_reaches_the_limit(limit: Any) -> None:
    path, _, name = str(limit.test).partition("::")
    assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE), name
