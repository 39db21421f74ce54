"""Renew leases and claims without a change of any index: the indexes of their times are replaced by others.

Nobody reads or writes the tables while the index of open runs is built, which takes less than a second for each million
runs. Processes of the previous version go on as before, because the new indexes answer their queries.

Revision ID: 0011
Revises: 0010
"""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None

OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    lock_both()
    op.create_index("runs_open", "runs", ["id"], unique=False, postgresql_where=OPEN, sqlite_where=OPEN)
    op.create_index("tickets_by_ring", "tickets", ["rung_at"], unique=False)
    op.drop_index("runs_by_lease", "runs")
    op.drop_index("tickets_by_until", "tickets")
    keep_room("SET (fillfactor = 70)", "SET (fillfactor = 50)")


def downgrade() -> None:
    lock_both()
    op.create_index("runs_by_lease", "runs", ["lease_until"], unique=False, postgresql_where=OPEN, sqlite_where=OPEN)
    op.create_index("tickets_by_until", "tickets", ["until"], unique=False)
    op.drop_index("runs_open", "runs")
    op.drop_index("tickets_by_ring", "tickets")
    keep_room("RESET (fillfactor)", "RESET (fillfactor)")


def lock_both() -> None:
    """Lock both tables in one statement, in the order in which every commit locks them, after all commits under way."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("LOCK TABLE runs, tickets IN ACCESS EXCLUSIVE MODE")


def keep_room(runs: str, tickets: str) -> None:
    """Set or reset the fill factor of pages written from now on: free room keeps updated rows in their page."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE runs {runs}")
        op.execute(f"ALTER TABLE tickets {tickets}")
