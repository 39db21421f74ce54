"""Add the ledger of disclosures: who was sent what in each call.

This version expands: a new table, which processes of earlier releases neither read nor write. The calls that they make
have no rows in it until `baton disclosures rebuild` derives them.

Revision ID: 0027
Revises: 0026
"""

import sqlalchemy as sa
from alembic import op

revision = "0027"
down_revision = "0026"
branch_labels = None
depends_on = None

ANOTHER_ROLE = "(SELECT NOT starts_with(current_user, 'baton_reader_'))"
TENANT = "(SELECT current_setting('baton.tenant', true))"


def upgrade() -> None:
    op.create_table(
        "disclosures",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("call", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("step", sa.BigInteger()),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("recipient", sa.Text(), nullable=False),
        sa.Column("provider", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("region", sa.Text(), nullable=False),
        sa.Column("tenant", sa.Text(), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("labels", sa.Text()),
        sa.Column("saw_user", sa.Boolean(), nullable=False),
        sa.Column("saw_steps", sa.Text(), nullable=False),
        sa.Column("saw_results", sa.Boolean(), nullable=False),
        sa.Column("unseen", sa.Text(), nullable=False),
        sa.Column("planned_by", sa.Text(), nullable=False),
        sa.Column("attempt", sa.BigInteger(), nullable=False),
        sa.Column("passed_over", sa.Text()),
        sa.Column("bytes", sa.BigInteger(), nullable=False),
        sa.Column("outcome", sa.Text()),
        sa.Column("input_tokens", sa.BigInteger()),
        sa.Column("output_tokens", sa.BigInteger()),
        sa.PrimaryKeyConstraint("run", "call"),
        sqlite_with_rowid=False,
        postgresql_with={"fillfactor": 90},
    )
    op.create_index("disclosures_by_recipient", "disclosures", ["recipient", "at", "call"])
    op.create_index("disclosures_by_tenant", "disclosures", ["tenant", "at", "call"])
    op.create_index("disclosures_by_time", "disclosures", ["at", "call"])
    labelled = sa.text("labels IS NOT NULL")
    op.create_index(
        "disclosures_labelled", "disclosures", ["at", "call"], postgresql_where=labelled, sqlite_where=labelled
    )
    if op.get_context().dialect.name == "postgresql":
        theirs = f"disclosures.tenant = {TENANT}"
        op.execute("CREATE POLICY baton_service ON disclosures USING (true) WITH CHECK (true)")
        op.execute(f"CREATE POLICY baton_tenant ON disclosures AS RESTRICTIVE USING ({ANOTHER_ROLE} OR {theirs})")
        op.execute("ALTER TABLE disclosures ENABLE ROW LEVEL SECURITY")


def downgrade() -> None:
    op.drop_table("disclosures")
