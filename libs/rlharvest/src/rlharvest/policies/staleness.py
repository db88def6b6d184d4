"""Admission and age (AReaL's gate, Fu et al. 2025, arXiv 2505.24298, section 5.1).

With i optimizer steps done, G groups a step and N groups trained, accepted or running, a new group may start only while
floor(N / G) <= i + eta. So eta = 0 is the synchronous algorithm: nothing of batch i + 1 starts before step i is done.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Gate:
    """The bound of one job."""

    groups_per_step: int
    max_staleness: int
    max_steps: int

    def room(self, *, counted: int, step: int) -> int:
        """Return how many groups may start now.

        Args:
            counted: N: groups trained + accepted + running, without those dropped, filtered or cancelled.
            step: i: optimizer steps done.
        """
        allowed = min((step + self.max_staleness + 1) * self.groups_per_step, self.max_steps * self.groups_per_step)
        return max(0, allowed - counted)

    def batch_of(self, rank: int) -> int:
        """Return the batch that the group of this rank among the counted ones will be in at the latest."""
        return rank // self.groups_per_step

    def oldest_step(self, rank: int) -> int:
        """Return the oldest optimizer step whose version may sample the group of this rank."""
        return max(0, self.batch_of(rank) - self.max_staleness)


def staleness(*, batch: int, oldest_step: int) -> int:
    """Return the age of a group in optimizer steps: its batch minus the step of its oldest token's version, at least 0."""
    return max(0, batch - oldest_step)


def over_age(age: int, *, max_staleness: int) -> bool:
    """Whether a group of this age is beyond the bound; one at the bound is kept."""
    return age > max_staleness
