"""docs/job.md says of every field of a job what the code says, and its examples are jobs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml
from rlharvest import fields
from rlharvest.jobs import aliases, reference
from rlharvest.jobs.model import JobSpec, parse

PAGE = Path(__file__).parents[2] / "docs" / "job.md"


def test_the_page_is_fresh() -> None:
    advice = "run: python -m rlharvest.jobs.reference > docs/job.md"
    assert PAGE.read_text(encoding="utf-8") == reference.text(), advice


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", reference.text(), re.DOTALL))
def test_an_example_is_a_job(example: str) -> None:
    parse(yaml.safe_load(example))


def test_every_field_has_a_meaning_and_a_row() -> None:
    """Of the blocks as well; a block itself is described by its section."""
    text = reference.text()
    for block in fields.of(JobSpec, {}):
        assert block.block is not None or block.meaning, block.name
        for field in fields.of(block.block, {}) if block.block is not None else ():
            assert field.meaning, f"{block.name}.{field.name}"
            assert re.search(rf"`{block.name}(\[\])?\.{field.name}`", text)


def test_every_foreign_name_leads_to_a_field() -> None:
    known = {field.name: field.block for field in fields.of(JobSpec, {})}
    for ours in aliases.ALIASES.values():
        block, _, name = ours.partition(".")
        holder = known[block]
        assert holder is None if not name else holder is not None and name in holder.model_fields, ours
