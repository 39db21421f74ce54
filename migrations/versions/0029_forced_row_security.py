"""Bind the owner of the tables to row-level security, in transactions that name a tenant.

Until this version only a role of readers was bound. Now every transaction in which `baton.tenant` is set sees and
writes the rows of that tenant alone, whatever its role, so that reads for callers are kept apart on servers where
nobody may create a role, too. A transaction without it is not restricted: engines, sweepers, migrations and commands.

This version expands: a process of an earlier release sets `baton.tenant` only together with the role of readers.

Revision ID: 0029
Revises: 0028
"""

from collections.abc import Mapping

from alembic import op

revision = "0029"
down_revision = "0028"
branch_labels = None
depends_on = None

NOT_A_READER = "NOT starts_with(current_user, 'baton_reader_')"
NO_TENANT = "coalesce(current_setting('baton.tenant', true), '') = ''"
"""A setting that ended with its transaction is empty afterwards. No tenant has an empty name."""
TENANT = "(SELECT current_setting('baton.tenant', true))"
BY_RUN = "(SELECT runs.tenant FROM runs WHERE runs.id = {table}.run) = {tenant}"
MAY_BE_NULL = "({table}.tenant IS NULL OR {table}.tenant = {tenant})"
OWN = "{table}.tenant = {tenant}"
TABLES: Mapping[str, str] = {
    "runs": OWN,
    "pruned_runs": OWN,
    "feedback": OWN,
    "disclosures": OWN,
    "events": BY_RUN,
    "contents": BY_RUN,
    "shared_contents": BY_RUN,
    "tags": BY_RUN,
    "texts": MAY_BE_NULL,
    "once": MAY_BE_NULL,
}


def upgrade() -> None:
    _bind(f"(SELECT {NOT_A_READER} AND {NO_TENANT})", "FORCE")


def downgrade() -> None:
    _bind(f"(SELECT {NOT_A_READER})", "NO FORCE")


def _bind(not_restricted: str, force: str) -> None:
    if op.get_context().dialect.name != "postgresql":
        return
    for table, condition in TABLES.items():
        own = condition.format(table=table, tenant=TENANT)
        op.execute(f"ALTER POLICY baton_tenant ON {table} USING ({not_restricted} OR {own})")
        op.execute(f"ALTER TABLE {table} {force} ROW LEVEL SECURITY")
