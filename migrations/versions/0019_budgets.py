"""Add budgets over several runs, with their holds and windows, and keep webhook messages that were given up.

This version expands: new tables, and columns that may be null. Processes of earlier releases neither read nor write
them, so budgets hold only once no such process is left.

Revision ID: 0019
Revises: 0018
"""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

OF_NOTICES = (("failed_at", sa.Double()), ("reason", sa.Text()), ("about", sa.Text()))


def upgrade() -> None:
    op.add_column("runs", sa.Column("budgets", sa.Text()))
    for name, kind in OF_NOTICES:
        op.add_column("notices", sa.Column(name, kind))
    op.create_table(
        "budgets",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("scope", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("period", sa.Text(), nullable=False),
        sa.Column("usd", sa.BigInteger(), nullable=False),
        sa.Column("zone", sa.Text(), nullable=False),
        sa.Column("soft", sa.Double()),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )
    op.create_index("budgets_by_tenant", "budgets", ["tenant", "scope", "name"])
    op.create_table(
        "budget_windows",
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("start", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("budget", sa.Text(), nullable=False),
        sa.Column("end", sa.BigInteger(), nullable=False),
        sa.Column("held", sa.BigInteger(), nullable=False),
        sa.Column("spent", sa.BigInteger(), nullable=False),
        sa.Column("overrun", sa.BigInteger(), nullable=False),
        sa.Column("warned_at", sa.Double()),
        sa.PrimaryKeyConstraint("account", "start"),
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 50},
    )
    op.create_index("budget_windows_by_budget", "budget_windows", ["budget", "start"])
    op.create_table(
        "budget_holds",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("account", sa.Text(), nullable=False),
        sa.Column("start", sa.BigInteger(), nullable=False),
        sa.Column("usd", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("run", "call", "account"),
        sqlite_with_rowid=False,
    )


def downgrade() -> None:
    for table in ("budget_holds", "budget_windows", "budgets"):
        op.drop_table(table)
    for name, _kind in OF_NOTICES:
        op.drop_column("notices", name)
    op.drop_column("runs", "budgets")
