"""Count the changes of every run's row, so that a writer can tell whether it knows the latest one.

This version expands: a column with a default, and a trigger on the table. Processes of 0.1 neither read nor raise the
column. The trigger raises it for each of their updates, except for the renewal of a lease, which no other writer has to
know of. It leaves alone an update that raises the column itself, as those of 0.2 and later do. From 0.3 on a later
version may drop the trigger and its function, because no process of 0.1 shares a database with one of 0.3.

Revision ID: 0012
Revises: 0011
"""

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

COUNTED = (
    "salt, deadline, epoch, driver, cap_usd, cap_tokens, seq, claims, held_usd, held_tokens, spent_usd, spent_tokens, "
    "state, topology, degraded, steps, ended_at, error, notify_turn"
)
"""Every column that an update changes, apart from `lease_until`: renewals change that one alone."""

POSTGRES = (
    """
    CREATE FUNCTION raise_run_revision() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        NEW.revision := OLD.revision + 1;
        RETURN NEW;
    END
    $$
    """,
    f"""
    CREATE TRIGGER runs_revision BEFORE UPDATE OF {COUNTED} ON runs FOR EACH ROW
    WHEN (NEW.revision = OLD.revision) EXECUTE FUNCTION raise_run_revision()
    """,
)
SQLITE = f"""
    CREATE TRIGGER runs_revision AFTER UPDATE OF {COUNTED} ON runs FOR EACH ROW
    WHEN NEW.revision = OLD.revision
    BEGIN
        UPDATE runs SET revision = OLD.revision + 1 WHERE id = NEW.id;
    END
"""


def upgrade() -> None:
    op.add_column("runs", sa.Column("revision", sa.BigInteger(), nullable=False, server_default=sa.text("0")))
    for statement in POSTGRES if is_postgres() else (SQLITE,):
        op.execute(statement)


def downgrade() -> None:
    if is_postgres():
        op.execute("DROP TRIGGER runs_revision ON runs")
        op.execute("DROP FUNCTION raise_run_revision()")
    else:
        op.execute("DROP TRIGGER runs_revision")
    op.drop_column("runs", "revision")


def is_postgres() -> bool:
    return op.get_context().dialect.name == "postgresql"
