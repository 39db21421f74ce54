"""Count how often the engine of a ticket was lost, so that a step that kills its engines can be given up.

Revision ID: 0003
Revises: 0002
"""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None


def upgrade() -> None:
    wait_briefly_for_locks()
    op.add_column("tickets", sa.Column("lost", sa.BigInteger(), nullable=False, server_default=sa.text("0")))


def downgrade() -> None:
    wait_briefly_for_locks()
    op.drop_column("tickets", "lost")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
