"""Add the transparency log, and triggers that queue whatever is to be sealed in it.

This version expands: new tables, and triggers by which writes of earlier releases are queued as well. No existing table
is rewritten. Rows of small tables from before this version are queued here, runs by the engine that seals.

Revision ID: 0028
Revises: 0027
"""

from collections.abc import Iterator, Mapping, Sequence

import sqlalchemy as sa
from alembic import op

revision = "0028"
down_revision = "0027"
branch_labels = None
depends_on = None

ADDED: Mapping[str, tuple[str, Sequence[str]]] = {
    "pruned_runs": ("pruned", ("id",)),
    "feedback": ("feedback", ("id",)),
    "catalogs": ("catalog", ("digest",)),
    "conductor_changes": ("conductor_change", ("id",)),
    "admin_events": ("admin_event", ("seq",)),
}
"""Tables whose rows are only added and are sealed then, with the kind of the entry and the columns of its id."""
CHANGED: Mapping[str, tuple[str, Sequence[str]]] = {
    "keys": ("key", ("id",)),
    "tenants": ("tenant", ("name",)),
    "budgets": ("budget", ("id",)),
    "holds": ("hold", ("id",)),
    "policies": ("policy", ("policy",)),
    "trials": ("trial", ("worker", "model", "version", "task")),
}
"""Tables whose rows are sealed again with every change."""
NOW = "extract(epoch FROM clock_timestamp())"
SQLITE_NOW = "(julianday('now') - 2440587.5) * 86400.0"
POSTGRES = (
    f"""
    CREATE FUNCTION log_runs() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN
        INSERT INTO log_queue (kind, id, xid, at)
        SELECT DISTINCT 'run', added.run, pg_current_xact_id()::text::bigint, {NOW} FROM added;
        RETURN NULL;
    END
    $$
    """,
    f"""
    CREATE FUNCTION log_row() RETURNS trigger LANGUAGE plpgsql AS $$
    DECLARE
        stated jsonb;
        named text;
    BEGIN
        IF TG_OP = 'DELETE' THEN
            stated := to_jsonb(OLD);
        ELSE
            stated := to_jsonb(NEW);
        END IF;
        FOR place IN 1 .. TG_NARGS - 1 LOOP
            named := concat_ws(E'\\n', named, stated ->> TG_ARGV[place]);
        END LOOP;
        INSERT INTO log_queue (kind, id, xid, at) VALUES (TG_ARGV[0], named, pg_current_xact_id()::text::bigint, {NOW});
        RETURN NULL;
    END
    $$
    """,
    "CREATE TRIGGER events_logged AFTER INSERT ON events REFERENCING NEW TABLE AS added "
    "FOR EACH STATEMENT EXECUTE FUNCTION log_runs()",
)
SQLITE = (
    "CREATE TRIGGER runs_logged_insert AFTER INSERT ON runs "
    f"BEGIN INSERT INTO log_queue (kind, id, xid, at) VALUES ('run', NEW.id, 0, {SQLITE_NOW}); END",
    "CREATE TRIGGER runs_logged_update AFTER UPDATE OF seq ON runs WHEN NEW.seq <> OLD.seq "
    f"BEGIN INSERT INTO log_queue (kind, id, xid, at) VALUES ('run', NEW.id, 0, {SQLITE_NOW}); END",
)
"""SQLite has no triggers for a whole statement; every entry of the journal changes `seq` of its run once."""


def upgrade() -> None:
    make_tables()
    for statement in triggers():
        op.execute(statement)
    for table, (kind, columns) in {**ADDED, **CHANGED}.items():
        now = NOW if is_postgres() else SQLITE_NOW
        op.execute(
            f"INSERT INTO log_queue (kind, id, xid, at) SELECT '{kind}', {identity(columns, '')}, 0, {now} FROM {table}"
        )
    op.execute("INSERT INTO log_state (id, size, xid, catch_up) VALUES (1, 0, 0, '')")


def make_tables() -> None:
    op.create_table(
        "log_leaves",
        sa.Column("place", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("subject", sa.Text(), nullable=False),
        sa.Column("events", sa.BigInteger(), nullable=False),
        sa.Column("entry", sa.LargeBinary(), nullable=False),
        sa.Column("salt", sa.LargeBinary()),
        sa.Column("frontier", sa.LargeBinary()),
        sa.PrimaryKeyConstraint("place"),
        sqlite_with_rowid=False,
    )
    op.create_index("log_leaves_by_subject", "log_leaves", ["subject"])
    op.create_table(
        "log_tiles",
        sa.Column("level", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("number", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("level", "number"),
    )
    op.create_table(
        "log_queue",
        sa.Column("n", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False, autoincrement=True),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("xid", sa.BigInteger(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("n"),
    )
    op.create_index("log_queue_by_xid", "log_queue", ["xid", "n"])
    op.create_table(
        "log_state",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("xid", sa.BigInteger(), nullable=False),
        sa.Column("catch_up", sa.Text()),
        sa.Column("signer", sa.Text()),
        sa.Column("verifiers", sa.Text()),
        sa.Column("checkpoint", sa.Text()),
        sa.Column("sealed_at", sa.Double()),
        sa.PrimaryKeyConstraint("id"),
    )


def triggers() -> Iterator[str]:
    """The statements that make the triggers of this dialect."""
    yield from POSTGRES if is_postgres() else SQLITE
    for table, (kind, columns) in {**ADDED, **CHANGED}.items():
        verbs = ("INSERT", "UPDATE", "DELETE") if table in CHANGED else ("INSERT",)
        if is_postgres():
            arguments = ", ".join([f"'{word}'" for word in (kind, *columns)])
            yield (
                f"CREATE TRIGGER {table}_logged AFTER {' OR '.join(verbs)} ON {table} "
                f"FOR EACH ROW EXECUTE FUNCTION log_row({arguments})"
            )
            continue
        for verb in verbs:
            row = "OLD." if verb == "DELETE" else "NEW."
            yield (
                f"CREATE TRIGGER {table}_logged_{verb.lower()} AFTER {verb} ON {table} BEGIN "
                f"INSERT INTO log_queue (kind, id, xid, at) "
                f"VALUES ('{kind}', {identity(columns, row)}, 0, {SQLITE_NOW}); END"
            )


def identity(columns: Sequence[str], row: str) -> str:
    """The id of an entry as an expression over the columns of a row."""
    line_feed = "chr(10)" if is_postgres() else "char(10)"
    return f" || {line_feed} || ".join([f"CAST({row}{column} AS TEXT)" for column in columns])


def downgrade() -> None:
    if is_postgres():
        for table in ("events", *ADDED, *CHANGED):
            op.execute(f"DROP TRIGGER {table}_logged ON {table}")
        op.execute("DROP FUNCTION log_runs()")
        op.execute("DROP FUNCTION log_row()")
    else:
        for statement in triggers():
            op.execute(f"DROP TRIGGER {statement.split()[2]}")
    for table in ("log_state", "log_queue", "log_tiles", "log_leaves"):
        op.drop_table(table)


def is_postgres() -> bool:
    return op.get_context().dialect.name == "postgresql"
