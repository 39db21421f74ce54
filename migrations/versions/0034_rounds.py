"""Note the rounds of a run.

This version expands: a column that may be null.

Revision ID: 0034
Revises: 0033
"""

import sqlalchemy as sa
from alembic import op

revision = "0034"
down_revision = "0033"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("rounds", sa.BigInteger()))


def downgrade() -> None:
    op.drop_column("runs", "rounds")
