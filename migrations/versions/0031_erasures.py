"""Note when and by what a run's content was erased.

This version expands: columns that may be null. Of runs that were erased before, and of those that a process of an
earlier release erases, both stay null.

Revision ID: 0031
Revises: 0030
"""

import sqlalchemy as sa
from alembic import op

revision = "0031"
down_revision = "0030"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("erased_at", sa.Double()))
    op.add_column("runs", sa.Column("erased_by", sa.Text()))


def downgrade() -> None:
    op.drop_column("runs", "erased_by")
    op.drop_column("runs", "erased_at")
