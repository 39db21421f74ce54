"""Add the keys under which contents of tenants are encrypted.

This version expands: a new table, which processes of earlier releases neither read nor write. They cannot read contents
that are encrypted, so master keys are to be set once every process has this release.

Revision ID: 0024
Revises: 0023
"""

import sqlalchemy as sa
from alembic import op

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "content_keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("made_at", sa.Double(), nullable=False),
        sa.Column("master", sa.Text(), nullable=False),
        sa.Column("wrapped", sa.LargeBinary(), nullable=False),
        sa.Column("retired_at", sa.Double()),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )
    op.create_index("content_keys_by_tenant", "content_keys", ["tenant"])


def downgrade() -> None:
    if not op.get_context().as_sql:
        refuse_to_destroy_keys(op.get_bind())
    op.drop_table("content_keys")


def refuse_to_destroy_keys(conn: sa.Connection) -> None:
    """Without its key an encrypted content is lost."""
    if conn.execute(sa.text("SELECT 1 FROM content_keys LIMIT 1")).first() is not None:
        raise RuntimeError("contents are encrypted under keys in the table content_keys, which would be lost")
