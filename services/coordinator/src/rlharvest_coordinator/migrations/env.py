"""What alembic runs: revisions on the connection that `migrate` hands over, inside its transaction."""

from __future__ import annotations

from alembic import context

from rlharvest_coordinator.tables import Base

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Base.metadata,
    render_as_batch=True,
    compare_type=True,
    transaction_per_migration=False,
)
context.run_migrations()
