"""Add the table of policies, which holds what selectors have learned.

Revision ID: 0009
Revises: 0008
"""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    wait_briefly_for_locks()
    op.create_table(
        "policies",
        sa.Column("policy", sa.Text(), nullable=False),
        sa.Column("number", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("policy"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    wait_briefly_for_locks()
    op.drop_table("policies")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
