"""How a benchmark runs: in a directory of its own, its bars set whatever happens, its figures printed last."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.report import Report


def run(bench: str, measure: Callable[[Report, Path], None], bars: Callable[[Report], None]) -> int:
    """Measure and print; return the exit status.

    Args:
        measure: puts each figure into the report as soon as it is there.
        bars: says what the figures must be; also after a measurement that broke off, which then misses them.
    """
    report = Report(bench)
    with tempfile.TemporaryDirectory(prefix="rlharvest-bench-") as directory:
        try:
            measure(report, Path(directory))
        finally:
            bars(report)
            status = report.finish()
    return status
