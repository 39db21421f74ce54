"""Add the windows of rate limits, which hold over all gateways.

This version expands: processes of earlier releases neither read nor write the table, and count for themselves.

Revision ID: 0023
Revises: 0022
"""

import sqlalchemy as sa
from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "rate_windows",
        sa.Column("name", sa.Text(), primary_key=True),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.Column("until", sa.Double(), nullable=False),
        sqlite_with_rowid=False,
    )
    op.create_index("rate_windows_by_until", "rate_windows", ["until"])


def downgrade() -> None:
    op.drop_table("rate_windows")
