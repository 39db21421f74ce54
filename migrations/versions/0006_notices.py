"""Add messages for the operator's webhook.

Revision ID: 0006
Revises: 0005
"""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column("runs", sa.Column("notify_turn", sa.BigInteger(), nullable=True))
    op.create_table(
        "notices",
        sa.Column("run", sa.Text(), nullable=False),
        sa.Column("turn", sa.BigInteger(), autoincrement=False, nullable=False),
        sa.Column("word", sa.Text(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("tries", sa.BigInteger(), nullable=False),
        sa.Column("due", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("run", "turn"),
        sqlite_with_rowid=False,
    )
    op.create_index("notices_by_due", "notices", ["due"], unique=False)


def downgrade() -> None:
    op.drop_table("notices")
    op.drop_column("runs", "notify_turn")
