"""Add indexes for lists of API keys that are read page by page.

This version expands: two indexes.

Revision ID: 0030
Revises: 0029
"""

from alembic import op

revision = "0030"
down_revision = "0029"
branch_labels = None
depends_on = None


def upgrade() -> None:
    wait_briefly_for_locks()
    op.create_index("keys_by_time", "keys", ["created_at", "id"])
    op.create_index("keys_by_tenant", "keys", ["tenant", "created_at", "id"])


def downgrade() -> None:
    wait_briefly_for_locks()
    op.drop_index("keys_by_tenant", "keys")
    op.drop_index("keys_by_time", "keys")


def wait_briefly_for_locks() -> None:
    """A migration that waits for a table lock makes every later statement wait behind it. Fail instead."""
    if op.get_context().dialect.name == "postgresql":
        op.execute("SET LOCAL lock_timeout = '3s'")
