"""Note the server of the database, so that a failover or a restore begins a new generation of fences.

This version expands: the column may be null, and processes of earlier releases neither read nor write it.

Revision ID: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    wait_briefly_for_locks()
    op.add_column("pulse", sa.Column("server", sa.Text()))


def downgrade() -> None:
    wait_briefly_for_locks()
    op.drop_column("pulse", "server")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
