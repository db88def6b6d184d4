"""docs/settings.md says of every RLHARVEST_ variable what the settings classes say."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import pytest
from rlharvest import fields

ROOT = Path(__file__).parents[2]
REFERENCE = runpy.run_path(str(ROOT / "docs" / "settings.py"))


def test_the_page_is_fresh() -> None:
    advice = "run: python docs/settings.py > docs/settings.md"
    assert (ROOT / "docs" / "settings.md").read_text(encoding="utf-8") == REFERENCE["text"](), advice


@pytest.mark.parametrize(("name", "settings", "computed"), REFERENCE["SERVICES"])
def test_every_setting_has_a_meaning(name: str, settings: type, computed: dict[str, str]) -> None:
    for field in fields.of(settings, computed):
        assert field.meaning, f"{name}: {field.name}"


def test_every_variable_that_compose_sets_is_one_that_a_service_reads() -> None:
    """A misspelt one would be ignored in silence."""
    compose = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")
    known = {
        f"RLHARVEST_{field}".upper() for _, settings, _ in REFERENCE["SERVICES"] for field in settings.model_fields
    }
    assert set(re.findall(r"^ *(RLHARVEST_[A-Z_]+):", compose, re.MULTILINE)) <= known
