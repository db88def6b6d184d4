"""The reward of the arithmetic example: 1 for the right answer, 0 for any other."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> float:
    """Return the score of one answer; called once a response."""
    return float(solution_str.strip() == ground_truth)
