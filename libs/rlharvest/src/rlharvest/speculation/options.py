"""What an engine is told about drafts; the defaults are the constants of RhymeRL (arXiv 2508.18588)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Enabled = Literal["auto", "on", "off"]

WINDOW_MAX = 32
MATCH_MAX = 7
MATCH_MIN = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Whether and how far to draft."""

    enabled: Enabled = "auto"
    """auto: while drafts are measured to be faster; on: always; off: never."""
    window_max: int = WINDOW_MAX
    """Most tokens of a draft."""
    match_max: int = MATCH_MAX
    """So many of the last tokens are looked up first."""
    match_min: int = MATCH_MIN
    """With fewer matching ones nothing is drafted."""
