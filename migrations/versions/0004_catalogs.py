"""Store pools as they were when runs were admitted, so that an audit works after the pool file has changed.

Revision ID: 0004
Revises: 0003
"""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None


def upgrade() -> None:
    wait_briefly_for_locks()
    op.create_table(
        "catalogs",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("digest"),
    )


def downgrade() -> None:
    wait_briefly_for_locks()
    op.drop_table("catalogs")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
