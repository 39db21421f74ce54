"""Add legal holds.

This version expands: a new table, which processes of earlier releases neither read nor write. They erase and prune as
if there were no holds, so all processes are to be updated before the first hold is placed.

Revision ID: 0026
Revises: 0025
"""

import sqlalchemy as sa
from alembic import op

revision = "0026"
down_revision = "0025"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "holds",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=False),
        sa.Column("placed_at", sa.Double(), nullable=False),
        sa.Column("placed_by", sa.Text(), nullable=False),
        sa.Column("released_at", sa.Double()),
        sa.Column("released_by", sa.Text()),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    if not op.get_context().as_sql:
        refuse_to_drop_holds(op.get_bind())
    op.drop_table("holds")


def refuse_to_drop_holds(conn: sa.Connection) -> None:
    """Without its row a hold would protect nothing any more."""
    if conn.execute(sa.text("SELECT 1 FROM holds WHERE released_at IS NULL LIMIT 1")).first() is not None:
        raise RuntimeError("legal holds are in force; release them with `baton holds release` first")
