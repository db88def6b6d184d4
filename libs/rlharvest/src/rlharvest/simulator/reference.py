"""Every field of a scenario, as Markdown: `python -m rlharvest.simulator.reference > docs/scenario.md`."""

from __future__ import annotations

import sys

from pydantic import BaseModel

from rlharvest import fields
from rlharvest.simulator.scenario import Scenario

HEADER = """# Scenarios: every field

Made by `python -m rlharvest.simulator.reference > docs/scenario.md`; [simulator.md](simulator.md) says how to use one.
"""


def reference() -> str:
    """Return the document: a section for the scenario and for each block in it."""
    parts = [HEADER]
    blocks: list[tuple[str, type[BaseModel]]] = [("The scenario", Scenario)]
    seen: set[type[BaseModel]] = set()
    while blocks:
        title, model = blocks.pop(0)
        if model in seen:
            continue
        seen.add(model)
        rows = []
        for field in fields.of(model, {}):
            kind = f"{field.kind}, {field.bounds}" if field.bounds else field.kind
            rows.append((f"`{field.name}`", kind, field.default or "required", field.meaning))
            if field.block is not None:
                blocks.append((f"`{field.name}`", field.block))
        parts.append(f"## {title}\n\n{(model.__doc__ or '').strip()}\n\n")
        parts[-1] += fields.table(("field", "type", "default", "meaning"), rows)
    return "\n".join(parts)


if __name__ == "__main__":
    sys.stdout.write(reference())
