"""Note the server of the database, so that a failover or a restore begins a new generation of fences.

This version expands: the column may be null, and processes of earlier releases neither read nor write it.

Revision ID: 0018
Revises: 0017
"""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("pulse", sa.Column("server", sa.Text()))


def downgrade() -> None:
    op.drop_column("pulse", "server")
