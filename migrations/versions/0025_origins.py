"""Note the run from which a run follows, and how.

This version expands: columns that may be null. Processes of earlier releases begin no runs that follow from others.

Revision ID: 0025
Revises: 0024
"""

import sqlalchemy as sa
from alembic import op

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

FOLLOWS = sa.text("origin_run IS NOT NULL")


def upgrade() -> None:
    op.add_column("runs", sa.Column("origin_kind", sa.Text()))
    op.add_column("runs", sa.Column("origin_run", sa.Text()))
    columns = ["origin_run", "created_at", "id"]
    op.create_index("runs_by_origin", "runs", columns, postgresql_where=FOLLOWS, sqlite_where=FOLLOWS)


def downgrade() -> None:
    op.drop_index("runs_by_origin", "runs")
    op.drop_column("runs", "origin_run")
    op.drop_column("runs", "origin_kind")
