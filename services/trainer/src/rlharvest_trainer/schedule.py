"""The learning rate as a pure function of the step."""

from __future__ import annotations

import math
from typing import Literal

Shape = Literal["constant", "linear", "cosine"]


def learning_rate(step: int, *, peak: float, shape: Shape, warmup_steps: int, max_steps: int) -> float:
    """Return the learning rate of the optimizer step that follows `step` done ones.

    It rises linearly over `warmup_steps`, the first step being peak / (warmup_steps + 1), and then stays, or falls to
    0 at `max_steps` on a line or half a cosine (Loshchilov and Hutter 2017, arXiv 1608.03983, eq. 5). Always in [0,
    peak].
    """
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if shape == "constant":
        return peak
    done = min(1.0, (step - warmup_steps) / max(1, max_steps - warmup_steps))
    return peak * (1.0 - done) if shape == "linear" else peak * 0.5 * (1.0 + math.cos(math.pi * done))
