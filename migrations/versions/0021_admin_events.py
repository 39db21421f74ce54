"""Add tenants, and the log of changes to keys, tenants and conductors with their authors.

This version expands: new tables, which processes of earlier releases neither read nor write. The table `forms` has
the time from which on the log has the creation of every key: from the beginning in an empty database, else a day after
this version ran, which is the time for a rolling update. A trigger refuses to alter or delete a logged change.

Revision ID: 0021
Revises: 0020
"""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

UPDATE_SECONDS = 86_400
"""Seconds that a rolling update may take."""
IN_USE = " OR ".join([f"EXISTS (SELECT 1 FROM {table})" for table in ("runs", "keys", "pulse")])
SINCE = (
    f"INSERT INTO forms (name, since) SELECT 'admin_events', CASE WHEN {IN_USE} THEN %s + {UPDATE_SECONDS} ELSE 0 END"
)
POSTGRES = (
    """
    CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        RAISE EXCEPTION 'the log of changes is only added to';
    END
    $$
    """,
    "CREATE TRIGGER admin_events_kept BEFORE UPDATE OR DELETE ON admin_events "
    "FOR EACH ROW EXECUTE FUNCTION refuse_change()",
)
SQLITE = tuple(
    f"CREATE TRIGGER admin_events_kept_{word.lower()} BEFORE {word} ON admin_events "
    "BEGIN SELECT RAISE(ABORT, 'the log of changes is only added to'); END"
    for word in ("UPDATE", "DELETE")
)


def upgrade() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("disabled_at", sa.Double()),
        sa.PrimaryKeyConstraint("name"),
    )
    op.create_table(
        "admin_events",
        sa.Column("seq", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("via", sa.Text(), nullable=False),
        sa.Column("action", sa.Text(), nullable=False),
        sa.Column("target", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("before", sa.LargeBinary()),
        sa.Column("after", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("seq"),
        sqlite_autoincrement=True,
    )
    op.create_index("admin_events_by_target", "admin_events", ["target", "seq"])
    op.create_index("admin_events_by_tenant", "admin_events", ["tenant", "seq"])
    for statement in POSTGRES if is_postgres() else SQLITE:
        op.execute(statement)
    now = "extract(epoch FROM clock_timestamp())" if is_postgres() else "(julianday('now') - 2440587.5) * 86400.0"
    op.execute(SINCE % now)


def downgrade() -> None:
    op.execute("DELETE FROM forms WHERE name = 'admin_events'")
    op.drop_table("admin_events")
    if is_postgres():
        op.execute("DROP FUNCTION refuse_change()")
    op.drop_table("tenants")


def is_postgres() -> bool:
    return op.get_context().dialect.name == "postgresql"
