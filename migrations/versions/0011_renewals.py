"""Leases and claims are prolonged in place: no index has their times any more.

The index of open runs is built while nobody reads or writes: less than a second for each million runs in the table.
Processes of the version before go on as they were: their questions are answered through the new indexes.

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
    wait_briefly_for_locks()
    lock_both()
    op.create_index("runs_open", "runs", ["id"], unique=False, postgresql_where=OPEN, sqlite_where=OPEN)
    op.create_index("tickets_by_ring", "tickets", ["rung_at"], unique=False)
    op.drop_index("runs_by_lease", "runs")
    op.drop_index("tickets_by_until", "tickets")
    keep_room("SET (fillfactor = 70)", "SET (fillfactor = 50)")


def downgrade() -> None:
    wait_briefly_for_locks()
    lock_both()
    op.create_index("runs_by_lease", "runs", ["lease_until"], unique=False, postgresql_where=OPEN, sqlite_where=OPEN)
    op.create_index("tickets_by_until", "tickets", ["until"], unique=False)
    op.drop_index("runs_open", "runs")
    op.drop_index("tickets_by_ring", "tickets")
    keep_room("RESET (fillfactor)", "RESET (fillfactor)")


def lock_both() -> None:
    """At once, and in the order of every entry: whoever has read a row in order to write it must be done with that."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("LOCK TABLE runs, tickets IN ACCESS EXCLUSIVE MODE")


def keep_room(runs: str, tickets: str) -> None:
    """For pages that are yet to be written."""
    if op.get_context().dialect.name == "postgresql":
        op.execute(f"ALTER TABLE runs {runs}")
        op.execute(f"ALTER TABLE tickets {tickets}")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
