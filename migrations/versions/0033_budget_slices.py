"""Add slices of budgets' accounts, each with an amount in escrow.

This version expands: columns that may be null or have a default. A process of an earlier release sees what is in escrow
as held in the account's own row, so it never spends it; it settles a hold in the slice in which that was made.

The downgrade adds the amounts of all slices to the rows of their accounts, moves the holds there, and deletes the
slices.

Revision ID: 0033
Revises: 0032
"""

import sqlalchemy as sa
from alembic import op

revision = "0033"
down_revision = "0032"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("budgets", sa.Column("slices", sa.Integer()))
    op.add_column("budget_windows", sa.Column("escrow", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    op.add_column("budget_windows", sa.Column("whole", sa.Text()))


def downgrade() -> None:
    slices = "FROM budget_windows AS slice WHERE slice.whole = budget_windows.account"
    slices += " AND slice.start = budget_windows.start"
    op.execute(
        f"UPDATE budget_windows SET spent = spent + (SELECT coalesce(sum(slice.spent), 0) {slices}),"
        f" overrun = overrun + (SELECT coalesce(sum(slice.overrun), 0) {slices}),"
        f" held = held - escrow + (SELECT coalesce(sum(slice.held), 0) {slices}) WHERE whole IS NULL"
    )
    op.execute(
        "UPDATE budget_holds SET account = (SELECT whole FROM budget_windows AS slice WHERE"
        " slice.account = budget_holds.account AND slice.start = budget_holds.start) WHERE EXISTS"
        " (SELECT 1 FROM budget_windows AS slice WHERE slice.account = budget_holds.account"
        " AND slice.start = budget_holds.start AND slice.whole IS NOT NULL)"
    )
    op.execute("DELETE FROM budget_windows WHERE whole IS NOT NULL")
    op.drop_column("budget_windows", "whole")
    op.drop_column("budget_windows", "escrow")
    op.drop_column("budgets", "slices")
