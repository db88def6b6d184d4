"""SECURITY.md: every threat names a test that exists, or a file of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
NAMED = re.compile(r"`(tests/[\w/.-]+\.py)(?:::(\w+))?`")


def test_every_threat_has_a_test() -> None:
    """Tables of threats have the head `| threat | … | test |`; a line without a test's name holds nothing."""
    lines = iter(TEXT.splitlines())
    threats = []
    for line in lines:
        if line.startswith("| threat |"):
            next(lines)  # the rule under the head
            for row in lines:
                if not row.startswith("|"):
                    break
                threats.append(row)
    assert len(threats) >= 20
    assert [row for row in threats if not NAMED.search(row)] == []


def test_every_test_that_is_named_exists() -> None:
    missing = []
    for file, name in NAMED.findall(TEXT):
        functions = _functions(ROOT / file)
        if name not in functions if name else not functions:
            missing.append(f"{file}::{name}")
    assert missing == []


def _functions(file: Path) -> set[str]:
    if not file.exists():
        return set()
    nodes = ast.walk(ast.parse(file.read_text(encoding="utf-8")))
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return {node.name for node in functions if node.name.startswith("test_")}
