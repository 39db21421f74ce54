"""Store once the texts that several runs of a conversation share, and compose contents of them.

This version expands: new tables, and a column that may be null. Processes of 0.2 do not know them, so they could not
read a content that is composed of texts. The table `forms` therefore has the time from which on processes of this
release store such contents: at once in an empty database, else a day after this version ran, which is the time for a
rolling update.

Revision ID: 0017
Revises: 0016
"""

import sqlalchemy as sa
from alembic import op

from app.store.rows import texts
from app.store.sqlkit.sealing import plain
from app.store.sqlkit.tables import CONTENTS, SHARED_CONTENTS

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

UPDATE_SECONDS = 86_400
"""Seconds that a rolling update may take."""
RUNS_AT_ONCE = 100
IN_USE = " OR ".join([f"EXISTS (SELECT 1 FROM {table})" for table in ("runs", "keys", "pulse")])
SINCE = f"INSERT INTO forms (name, since) SELECT 'shared', CASE WHEN {IN_USE} THEN %s + {UPDATE_SECONDS} ELSE 0 END"


def upgrade() -> None:
    op.add_column("runs", sa.Column("thread", sa.Text()))
    op.create_table(
        "shared_contents",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("head", sa.Text()),
        sa.Column("tail", sa.Text()),
        sa.Column("owner", sa.BigInteger(), nullable=False),
        sa.Column("size", sa.BigInteger(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run", "ref"),
    )
    op.create_index("shared_contents_by_head", "shared_contents", ["head"])
    op.create_index("shared_contents_by_tail", "shared_contents", ["tail"])
    op.create_table(
        "texts",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("before", sa.Text()),
        sa.Column("spoken", sa.Boolean(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_index("texts_by_before", "texts", ["before"])
    op.create_table(
        "forms",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("since", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("name"),
    )
    postgres = op.get_context().dialect.name == "postgresql"
    clock = "extract(epoch FROM clock_timestamp())" if postgres else "(julianday('now') - 2440587.5) * 86400.0"
    op.execute(SINCE % clock)


def downgrade() -> None:
    if not op.get_context().as_sql:
        make_contents_whole(op.get_bind())
    op.drop_table("forms")
    op.drop_table("texts")
    op.drop_table("shared_contents")
    op.drop_column("runs", "thread")


def make_contents_whole(conn: sa.Connection) -> None:
    """Store all contents whole, as processes of 0.2 read them. `baton migrate --sql` cannot do that."""
    theirs = SHARED_CONTENTS.c.run
    while names := conn.execute(sa.select(theirs).distinct().limit(RUNS_AT_ONCE)).scalars().all():
        for run, bodies in texts.of_runs(conn, names, plain).items():
            stored = conn.execute(sa.select(CONTENTS.c.ref).where(CONTENTS.c.run == run)).scalars().all()
            rows = [{"run": run, "ref": ref, "body": body} for ref, body in bodies.items() if ref not in stored]
            if rows:
                conn.execute(sa.insert(CONTENTS), rows)
        conn.execute(sa.delete(SHARED_CONTENTS).where(theirs.in_(names)))
