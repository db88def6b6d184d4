"""The groups of a prompt, by epoch: what drafts are made of."""

from __future__ import annotations

from alembic import op
from rlharvest_coordinator.migrations import no_way_down

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_index("groups_by_prompt", "groups", ["job", "prompt", "data_epoch"])


downgrade = no_way_down
