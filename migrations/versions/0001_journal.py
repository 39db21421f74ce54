"""Add runs, events, contents, the outbox, tags, keys, and the row of the readiness probe.

Revision ID: 0001
Revises:
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

END = sa.text("kind IN ('run.succeeded', 'run.failed', 'run.cancelled', 'run.expired', 'run.over_budget')")
UNHAPPY = sa.text("state IN ('cancelled', 'expired', 'failed', 'over_budget')")
OPEN = sa.text("ended_at IS NULL")


def upgrade() -> None:
    op.create_table(
        "contents",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("ref", sa.Text(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run", "ref"),
    )
    op.create_table(
        "events",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("seq", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("body", sa.LargeBinary(), nullable=False),
        sa.PrimaryKeyConstraint("run", "seq"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "events_one_end",
        "events",
        ["run"],
        unique=True,
        postgresql_where=sa.text(
            "kind IN ('run.succeeded', 'run.failed', 'run.cancelled', 'run.expired', 'run.over_budget')"
        ),
        sqlite_where=sa.text(
            "kind IN ('run.succeeded', 'run.failed', 'run.cancelled', 'run.expired', 'run.over_budget')"
        ),
    )
    op.create_table(
        "keys",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("digest", sa.LargeBinary(), nullable=False),
        sa.Column("scopes", sa.Text(), nullable=False),
        sa.Column("tiers", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("max_usd", sa.BigInteger(), nullable=True),
        sa.Column("rpm", sa.BigInteger(), nullable=True),
        sa.Column("concurrency", sa.BigInteger(), nullable=True),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "pulse",
        sa.Column("id", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("beats", sa.BigInteger(), nullable=False),
        sa.PrimaryKeyConstraint("id"),
    )
    op.create_table(
        "runs",
        sa.Column("id", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("code", sa.Text(), nullable=False),
        sa.Column("salt", sa.LargeBinary(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("deadline", sa.Double(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("lease_until", sa.Double(), nullable=False),
        sa.Column("cap_usd", sa.BigInteger(), nullable=False),
        sa.Column("cap_tokens", sa.BigInteger(), nullable=False),
        sa.Column("seq", sa.BigInteger(), nullable=False),
        sa.Column("claims", sa.BigInteger(), nullable=False),
        sa.Column("held_usd", sa.BigInteger(), nullable=False),
        sa.Column("held_tokens", sa.BigInteger(), nullable=False),
        sa.Column("spent_usd", sa.BigInteger(), nullable=False),
        sa.Column("spent_tokens", sa.BigInteger(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("topology", sa.Text(), nullable=True),
        sa.Column("degraded", sa.Boolean(), nullable=False),
        sa.Column("steps", sa.BigInteger(), nullable=False),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("error", sa.Text(), nullable=True),
        sa.PrimaryKeyConstraint("id"),
        sqlite_with_rowid=False,
    )
    op.create_index(
        "runs_by_lease",
        "runs",
        ["lease_until"],
        unique=False,
        postgresql_where=sa.text("ended_at IS NULL"),
        sqlite_where=sa.text("ended_at IS NULL"),
    )
    op.create_index("runs_by_tenant", "runs", ["tenant", "created_at", "id"], unique=False)
    op.create_index("runs_by_time", "runs", ["created_at", "id"], unique=False)
    op.create_index(
        "runs_unhappy",
        "runs",
        ["state", "created_at", "id"],
        unique=False,
        postgresql_where=UNHAPPY,
        sqlite_where=UNHAPPY,
    )
    op.create_table(
        "tags",
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("value", sa.Text(), nullable=False),
        sa.Column("run", sa.Text(), nullable=False),
        sa.PrimaryKeyConstraint("name", "value", "run"),
        sqlite_with_rowid=False,
    )
    op.create_table(
        "tickets",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("step", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("tier", sa.Text(), nullable=False),
        sa.Column("driver", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("claim", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=True),
        sa.Column("until", sa.Double(), nullable=False),
        sa.Column("rung_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run", "step"),
        sqlite_with_rowid=False,
    )
    op.create_index("tickets_by_until", "tickets", ["until"], unique=False)


def downgrade() -> None:
    for table in ("tickets", "tags", "runs", "pulse", "keys", "events", "contents"):
        op.drop_table(table)
