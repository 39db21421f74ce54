"""Add row-level security for reads made for callers, and the tenants of texts and idempotency claims.

This version expands: two columns that may be null, which processes of earlier releases neither read nor write, and
policies that concern no role but the readers' (`app/store/sqlkit/row_security.py` makes it after the last version). All
other roles see and write all rows as before: the owner of the tables is not subject to policies, and `baton_service`
admits everybody else.

Revision ID: 0022
Revises: 0021
"""

from collections.abc import Mapping

import sqlalchemy as sa
from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None

ANOTHER_ROLE = "(SELECT NOT starts_with(current_user, 'baton_reader_'))"
TENANT = "(SELECT current_setting('baton.tenant', true))"
"""Both are selects of their own, so that they are computed once for a statement and not once for each row."""
BY_RUN = "(SELECT runs.tenant FROM runs WHERE runs.id = {table}.run) = {tenant}"
"""By the primary key of `runs`. Not EXISTS, for which Postgres may choose to read all runs of the tenant first."""
MAY_BE_NULL = "({table}.tenant IS NULL OR {table}.tenant = {tenant})"
"""Rows of earlier releases have no tenant. They are addressed by keyed hashes, which another tenant cannot compute."""
POLICIES: Mapping[str, str] = {
    "runs": "{table}.tenant = {tenant}",
    "pruned_runs": "{table}.tenant = {tenant}",
    "feedback": "{table}.tenant = {tenant}",
    "events": BY_RUN,
    "contents": BY_RUN,
    "shared_contents": BY_RUN,
    "tags": BY_RUN,
    "texts": MAY_BE_NULL,
    "once": MAY_BE_NULL,
}


def upgrade() -> None:
    op.add_column("texts", sa.Column("tenant", sa.Text()))
    op.add_column("once", sa.Column("tenant", sa.Text()))
    if op.get_context().dialect.name != "postgresql":
        return
    for table, condition in POLICIES.items():
        theirs = condition.format(table=table, tenant=TENANT)
        op.execute(f"CREATE POLICY baton_service ON {table} USING (true) WITH CHECK (true)")
        op.execute(f"CREATE POLICY baton_tenant ON {table} AS RESTRICTIVE USING ({ANOTHER_ROLE} OR {theirs})")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for table in POLICIES:
            op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
            op.execute(f"DROP POLICY baton_tenant ON {table}")
            op.execute(f"DROP POLICY baton_service ON {table}")
    op.drop_column("once", "tenant")
    op.drop_column("texts", "tenant")
