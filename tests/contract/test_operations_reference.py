"""docs/operations.md says what to do about every reason that a job may show."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from rlharvest_coordinator import obstacles
from rlharvest_coordinator.store.jobs import REASONS

ROOT = Path(__file__).parents[2]


def test_every_reason_of_a_job_is_explained_and_no_other() -> None:
    source = (ROOT / "services" / "coordinator" / "src" / "rlharvest_coordinator" / "run.py").read_text("utf-8")
    (explain,) = (
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef) and node.name == "explain"
    )
    live = {
        node.value.elts[0].value
        for node in ast.walk(explain)
        if isinstance(node, ast.Return)
        and isinstance(node.value, ast.Tuple)
        and isinstance(node.value.elts[0], ast.Constant)
    }
    assert "WaitingForWorkers" in live
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (body,) = re.findall(r"^\| status \| reason \|.*?\n\n", page, re.DOTALL | re.MULTILINE)
    listed = {name for row in body.strip().splitlines()[2:] for name in re.findall(r"`(\w+)`", row.split("|")[2])}
    assert listed == live | {reason for reason, _ in REASONS.values()} | set(obstacles.REASONS)
