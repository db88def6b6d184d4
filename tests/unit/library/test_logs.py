"""What a log shows of a fault."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import structlog
from rlharvest import logs
logs.configure("x", style={style!r})
def fails():
    token = "s3cret-" + "tok3n"
    raise KeyError("gone")
try:
    fails()
except KeyError as error:
    structlog.get_logger().error("it.failed", exc_info=error)
"""


@pytest.mark.parametrize("style", ["console", "json"])
def test_a_fault_is_shown_with_its_lines_and_without_the_values_of_variables(style: str) -> None:
    program = [sys.executable, "-c", PROGRAM.format(style=style)]
    shown = subprocess.run(program, capture_output=True, text=True, check=True, timeout=60).stderr
    assert "it.failed" in shown
    assert "in fails" in shown
    assert "KeyError" in shown
    assert "s3cret-tok3n" not in shown
