"""Add the earlier secret of a key that is being rotated.

This version expands: both columns may be null, and processes of earlier releases neither read nor write them. Such a
process knows the new secret alone.

Revision ID: 0014
Revises: 0013
"""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("keys", sa.Column("previous_digest", sa.LargeBinary()))
    op.add_column("keys", sa.Column("previous_until", sa.Double()))


def downgrade() -> None:
    op.drop_column("keys", "previous_until")
    op.drop_column("keys", "previous_digest")
