"""${message}

Migrations expand before they contract: processes of the release before share the database with this one during an
upgrade, and must be able to read and write every table. So add tables, indexes, and columns that may be NULL or have a
default on the server; remove, rename or tighten what the last release still uses only in the release after the next.
See deploy/docs/decisions.md. (Replace this paragraph by what the version does, and what it expands or contracts.)

Revision ID: ${up_revision}
Revises: ${down_revision | comma,n}
"""

from alembic import op
import sqlalchemy as sa
${imports if imports else ""}

revision = ${repr(up_revision)}
down_revision = ${repr(down_revision)}
branch_labels = ${repr(branch_labels)}
depends_on = ${repr(depends_on)}


def upgrade() -> None:
    ${upgrades if upgrades else "pass"}


def downgrade() -> None:
    ${downgrades if downgrades else "pass"}
