"""Settings of the trainer (environment variables RLHARVEST_…)."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from rlharvest.settings import ServiceSettings


def _hostname() -> str:
    return "trainer-" + "".join(c if c.isalnum() or c == "-" else "-" for c in socket.gethostname())[:80]


class TrainerSettings(ServiceSettings):
    """Who it is, what it computes with, and how patient it is."""

    trainer: str = Field(default_factory=_hostname, pattern=r"^[A-Za-z0-9_\-]{1,100}$")
    """Stable name: a restarted trainer of this name gets its job back at once. Unset: from the host's name."""

    threads: int = Field(0, ge=0)
    """Threads for computing; 0: as many as this process may use cores. Another number gives other last bits."""

    device: str = "auto"
    """`cpu`, `cuda`, `cuda:1`, …; `auto`: the first GPU if there is one."""

    attention: Literal["sdpa", "eager"] = "sdpa"
    """Kernel of attention; `eager` is slower and plainer."""

    roots: list[Path] | None = None
    """Directories that models must lie in, links followed, as a JSON list; checked again when a model is loaded. Unset: what
    the coordinator has checked is enough."""

    claim_wait_s: float = Field(10.0, gt=0)
    """How long a request for a job waits at the coordinator."""

    poll_s: float = Field(0.5, gt=0)
    """How often to ask for more groups when no wake-up comes."""

    min_free_bytes: int = Field(256 << 20, ge=0)
    """Checkpoints and publications that would leave less space than this on the disk wait until there is more."""

    @field_validator("device")
    @classmethod
    def _known_device(cls, device: str) -> str:
        kind = device.partition(":")[0]
        if kind not in {"auto", "cpu", "cuda", "mps"}:
            raise ValueError(f"device {device!r} is not known; use auto, cpu, cuda or cuda:<number>")
        return device
