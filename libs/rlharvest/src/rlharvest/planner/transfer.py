"""How long new weights take to reach the machines that roll out.

A machine pulls a version once, whatever it runs. The machines that train serve it, each over its own link.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

DELTA_SHARE = 0.03
"""Bytes of an exact delta over those of all weights: 1 to 3 % of the bytes change in a step at learning rates of 1e-6
(measurements of verl and SparrowRL)."""

LOAD_GB_PER_S = 20.0
"""From a machine's memory to its GPUs, through PCIe, for all of them together."""

Mode = Literal["delta", "full"]


@dataclass(frozen=True, slots=True)
class Update:
    """Seconds of one version."""

    pull_s: float
    """Until the last machine has it."""
    swap_s: float
    """In which a machine does not generate."""


def update(weight_bytes: float, *, mode: Mode, senders: int, copies: Sequence[int], links: Sequence[float]) -> Update:
    """Return what one version costs.

    Args:
        senders: machines that serve it. copies: machines that pull it, by kind. links: to each kind, bytes a second.
    """
    size = weight_bytes * (DELTA_SHARE if mode == "delta" else 1.0)
    served = sum(count * size / link for count, link in zip(copies, links, strict=True))
    slowest = max((size / link for count, link in zip(copies, links, strict=True) if count), default=0.0)
    return Update(max(served / max(1, senders), slowest), size / (LOAD_GB_PER_S * 1e9))
