"""Add indexes for lists of runs by cost, and for erasing the tags with callers' words.

This version expands: processes of earlier releases keep the indexes up to date and never read them. Postgres lets
nobody write to a table while it builds an index. Where that takes too long, build them before by `CREATE INDEX
CONCURRENTLY` under these names: one that is there already stays as it is.

Revision ID: 0020
Revises: 0019
"""

import sqlalchemy as sa
from alembic import op

revision = "0020"
down_revision = "0019"
branch_labels = None
depends_on = None

ENDED = "ended_at IS NOT NULL"
OF_CALLERS = "name IN ('metadata', 'user')"
INDEXES = (
    ("runs_by_cost", "runs", ("spent_usd", "id"), ENDED),
    ("runs_by_tenant_cost", "runs", ("tenant", "spent_usd", "id"), ENDED),
    ("tags_of_callers", "tags", ("run",), OF_CALLERS),
)


def upgrade() -> None:
    for name, table, columns, condition in INDEXES:
        where = sa.text(condition)
        op.create_index(name, table, columns, postgresql_where=where, sqlite_where=where, if_not_exists=True)


def downgrade() -> None:
    for name, table, _, _ in INDEXES:
        op.drop_index(name, table_name=table)
