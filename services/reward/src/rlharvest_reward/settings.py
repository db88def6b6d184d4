"""Settings of the reward service (environment variables RLHARVEST_…)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from pydantic import Field
from rlharvest.settings import ServiceSettings

from rlharvest_reward.sandbox import Sandbox


class RewardSettings(ServiceSettings):
    """Which files it may run, and how much it runs at a time."""

    roots: list[Path] = Field(default_factory=lambda: [Path.cwd()])
    """Directories that reward files of jobs must lie in, as a JSON list; symbolic links are followed first. Reward code
    may read what lies under them, but for their entries that begin with a dot."""

    reward_hidden: list[Path] = Field(default_factory=list)
    """Directories that reward code may not read though they lie under a root, as a JSON list; data_dir and
    secrets_dir always are."""

    reward_sandbox: Literal["required", "best_effort"] = "required"
    """`required`: do not start where the sandbox of reward code does not hold. `best_effort`: do without what is missing,
    which then means that jobs run code with rights of this service."""

    reward_shared_memory: bool = False
    """Whether reward code may use /dev/shm, which multiprocessing's locks, queues and pools need. All processes of one user
    share it, so only where this service has one of its own, as in a container."""

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

    @property
    def sandbox(self) -> Sandbox:
        """What reward code is let through to."""
        secrets = [self.secrets_dir] if self.secrets_dir is not None else []
        return Sandbox(
            roots=tuple(str(root.resolve()) for root in self.roots),
            hidden=tuple(str(path.resolve()) for path in (self.data_dir, *secrets, *self.reward_hidden)),
            shared_memory=self.reward_shared_memory,
            required=self.reward_sandbox == "required",
        )
