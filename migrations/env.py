"""Alembic's environment: one transaction for all versions, one process at a time."""

import asyncio

from alembic import context
from sqlalchemy import URL, Connection, text
from sqlalchemy.pool import NullPool

from app.store.sqlkit import row_security
from app.store.sqlkit.migrate import newest, revision
from app.store.sqlkit.postgres import postgres_engine
from app.store.sqlkit.runner import parse_url
from app.store.sqlkit.sqlite import sqlite_engine
from app.store.sqlkit.tables import METADATA

MIGRATION_LOCK = 0x6261746F6E  # "baton"; any number that no other program on the database uses

WAIT_BRIEFLY = "SET LOCAL lock_timeout = '3s'"
"""A migration that waits for a table's lock makes every later statement wait behind it: it fails instead."""


def database() -> URL:
    """From `app.store.sqlkit.migrate`, or from `-x url=...` on the command line."""
    given = context.config.attributes.get("url")
    return given if given is not None else parse_url(context.get_x_argument(as_dictionary=True)["url"])


def upgrade(connection: Connection) -> None:
    """Run the versions on an open connection."""
    context.configure(connection, target_metadata=METADATA, transactional_ddl=True, compare_server_default=True)
    with context.begin_transaction():
        if connection.dialect.name == "postgresql":  # SQLite's transaction has the write lock already
            connection.execute(text("SELECT pg_advisory_xact_lock(:number)"), {"number": MIGRATION_LOCK})
            connection.execute(text(WAIT_BRIEFLY))
        context.run_migrations()
        if connection.dialect.name == "postgresql" and revision(connection) == newest():
            row_security.enforce(connection)


async def upgrade_postgres(url: URL) -> None:
    """The same through asyncpg, the one Postgres driver that is installed."""
    engine = postgres_engine(url, poolclass=NullPool, connect_args={"timeout": 10})
    async with engine.connect() as connection:
        await connection.run_sync(upgrade)
        await connection.commit()
    await engine.dispose()


def print_sql(url: URL) -> None:
    """For `alembic upgrade --sql`."""
    context.configure(url=url, target_metadata=METADATA, literal_binds=True)
    with context.begin_transaction():
        if url.get_backend_name() == "postgresql":
            context.execute(WAIT_BRIEFLY)
        context.run_migrations()


def main() -> None:
    url = database()
    if context.is_offline_mode():
        print_sql(url)
    elif url.get_backend_name() == "sqlite":
        engine = sqlite_engine(url)
        with engine.connect() as connection:
            upgrade(connection)
        engine.dispose()
    else:
        asyncio.run(upgrade_postgres(url))


main()
