"""Settings of the reward service (environment variables RLHARVEST_…)."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import Field
from rlharvest.settings import ServiceSettings


class RewardSettings(ServiceSettings):
    """Which files it may run, and how much it runs at a time."""

    roots: list[Path] = Field(default_factory=lambda: [Path.cwd()])
    """Directories that reward files of jobs must lie in, as a JSON list; symbolic links are followed first."""

    processes: int = Field(default_factory=lambda: max(2, os.cpu_count() or 2), ge=1, le=4096)
    """Most processes of reward functions, busy and idle ones together."""

    idle_s: float = Field(default=300.0, gt=0)
    """A process without a call for this long is closed."""

    load_timeout_s: float = Field(default=120.0, gt=0)
    """Longest time for a process to start and to import its function."""

    ack_wait_s: float = Field(default=15.0, ge=1)
    """A request of a replica that has gone silent goes to another one after this time."""

    drain_s: float = Field(default=3.0, ge=0)
    """At a stop, how long requests in work may still take before they are handed back."""
