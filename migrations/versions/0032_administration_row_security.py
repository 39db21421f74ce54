"""Add row-level security for keys, tenants, budgets, changes, holds and content keys.

From this version on, a transaction in which `baton.tenant` is set sees and writes the rows of that tenant alone in
these tables as well, as migration 0029 did it for runs. A transaction without it is not restricted.

This version expands: no process of an earlier release reads or writes these tables in a transaction that names a
tenant.

Revision ID: 0032
Revises: 0031
"""

from collections.abc import Mapping

from alembic import op

revision = "0032"
down_revision = "0031"
branch_labels = None
depends_on = None

NOT_RESTRICTED = (
    "(SELECT NOT starts_with(current_user, 'baton_reader_') "
    "AND coalesce(current_setting('baton.tenant', true), '') = '')"
)
TENANT = "(SELECT current_setting('baton.tenant', true))"
"""Both are selects of their own, so that they are computed once for a statement and not once for each row."""
OWN = "{table}.tenant = {tenant}"
TABLES: Mapping[str, str] = {
    "keys": OWN,
    "budgets": OWN,
    "admin_events": OWN,
    "holds": OWN,
    "content_keys": OWN,
    "tenants": "{table}.name = {tenant}",
    "budget_windows": "(SELECT budgets.tenant FROM budgets WHERE budgets.id = {table}.budget) = {tenant}",
}


def upgrade() -> None:
    op.create_index("holds_by_tenant", "holds", ["tenant", "placed_at", "id"])
    if op.get_context().dialect.name != "postgresql":
        return
    for table, condition in TABLES.items():
        own = condition.format(table=table, tenant=TENANT)
        op.execute(f"CREATE POLICY baton_service ON {table} USING (true) WITH CHECK (true)")
        op.execute(f"CREATE POLICY baton_tenant ON {table} AS RESTRICTIVE USING ({NOT_RESTRICTED} OR {own})")
        op.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        op.execute(f"ALTER TABLE {table} FORCE ROW LEVEL SECURITY")


def downgrade() -> None:
    if op.get_context().dialect.name == "postgresql":
        for table in TABLES:
            op.execute(f"ALTER TABLE {table} NO FORCE ROW LEVEL SECURITY")
            op.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
            op.execute(f"DROP POLICY baton_tenant ON {table}")
            op.execute(f"DROP POLICY baton_service ON {table}")
    op.drop_index("holds_by_tenant", "holds")
