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
    op.create_index("keys_by_time", "keys", ["created_at", "id"])
    op.create_index("keys_by_tenant", "keys", ["tenant", "created_at", "id"])


def downgrade() -> None:
    op.drop_index("keys_by_tenant", "keys")
    op.drop_index("keys_by_time", "keys")
