"""Note the pepper under which an API key is hashed, so that peppers can be rotated.

This version expands: the column may be null, and processes of earlier releases neither read nor write it.

Revision ID: 0016
Revises: 0015
"""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("keys", sa.Column("pepper", sa.Text()))


def downgrade() -> None:
    op.drop_column("keys", "pepper")
