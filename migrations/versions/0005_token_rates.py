"""Add a key's limit of tokens a minute.

Revision ID: 0005
Revises: 0004
"""

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    wait_briefly_for_locks()
    op.add_column("keys", sa.Column("tpm", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    wait_briefly_for_locks()
    op.drop_column("keys", "tpm")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
