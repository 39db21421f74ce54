"""The revision of a database's schema, compared with this program's, and the reason why a database cannot be used.

Nothing here writes but `change`, and no SQLite file is created. Alembic is imported when it is first used, which is for
a database that has not this program's schema.
"""

import asyncio
import io
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import asyncpg
from msgspec import Struct
from sqlalchemy import Connection, create_engine, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import NullPool

from app.errors import ConfigInvalid, StoreUnavailable
from app.store.sqlkit.migrate import ONE_AT_A_TIME, alembic_config, newest, reason, revision
from app.store.sqlkit.postgres import pools_transactions, postgres_engine, share_server_connections
from app.store.sqlkit.row_security import RowSecurity, state
from app.store.sqlkit.runner import LOCK_SECONDS, parse_url

CONNECT_SECONDS = 5.0


class Revision(Struct, frozen=True):
    """One version of the schema: its number, and the first line of its description."""

    id: str
    title: str


class Status(Struct, frozen=True):
    """The revision that a database has (None without tables), the one that this program needs, and those between."""

    current: str | None
    head: str
    pending: tuple[Revision, ...]
    newer: bool = False
    """True if this program does not know the database's revision."""

    @property
    def is_current(self) -> bool:
        """Return True if the database has exactly this program's schema."""
        return self.current == self.head


def exists(url: str) -> bool:
    """Return False for an SQLite file that does not exist; True for every other URL."""
    return parse_url(url).get_backend_name() != "sqlite" or sqlite_file(url).is_file()


def sqlite_file(url: str) -> Path:
    """Return the file of an SQLite database."""
    return Path(parse_url(url).database or "")


def status(url: str) -> Status:
    """Return the state of a database's schema. Must not be called on a thread with a running loop.

    Raises `StoreUnavailable` with the reason if the database cannot be reached or refuses.
    """
    with _explained_failures(parse_url(url)):
        current = _current(url)
    if current == newest():
        return Status(current, current, ())
    revisions = _all_revisions(url)
    names = [revision.id for revision in revisions]
    if current is None:
        return Status(None, names[-1], tuple(revisions))
    if current not in names:
        return Status(current, names[-1], (), newer=True)
    return Status(current, names[-1], tuple(revisions[names.index(current) + 1 :]))


def count_connections(url: str) -> int:
    """Return the number of connections that processes of Baton have to a Postgres; 0 for SQLite. Must not be called on
    a thread with a running loop.

    Raises `StoreUnavailable` with the reason if the database cannot be reached or refuses.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return 0
    with _explained_failures(parsed):
        return asyncio.run(_count_connections(parsed))


def row_security(url: str) -> RowSecurity:
    """Return the state of row-level security for reads that are made for callers; none is in force on SQLite. Must not
    be called on a thread with a running loop."""
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite":
        return RowSecurity("", "SQLite has none")
    return asyncio.run(_row_security(parsed))


async def _row_security(url: URL) -> RowSecurity:
    engine = postgres_engine(url, poolclass=NullPool, connect_args={"timeout": CONNECT_SECONDS})
    try:
        async with asyncio.timeout(2 * CONNECT_SECONDS), engine.connect() as connection:
            return await connection.run_sync(state)
    finally:
        await engine.dispose()


def has_undeclared_pooling(url: str) -> bool:
    """Return True if a PgBouncer pools transactions before this Postgres, and the URL does not say so. Must not be
    called on a thread with a running loop.

    Raises `StoreUnavailable` with the reason if the database cannot be reached or refuses.
    """
    parsed = parse_url(url)
    if parsed.get_backend_name() == "sqlite" or pools_transactions(parsed):
        return False
    with _explained_failures(parsed):
        return asyncio.run(_share_server_connections(parsed))


async def _share_server_connections(url: URL) -> bool:
    async with asyncio.timeout(2 * CONNECT_SECONDS):
        return await share_server_connections(url, connect_args={"timeout": CONNECT_SECONDS})


def change(url: str, work: Callable[[Connection], None]) -> None:
    """Change a Postgres database in one transaction. Must not be called on a thread with a running loop.

    Raises `StoreUnavailable` with the reason if the database cannot be reached or refuses, or if others hold a lock
    that the change needs.
    """
    parsed = parse_url(url)
    with _explained_failures(parsed):
        asyncio.run(_change(parsed, work))


@contextmanager
def _explained_failures(url: URL) -> Iterator[None]:
    """Raise `StoreUnavailable` with the reason where the database cannot be reached or refuses."""
    try:
        yield
    except (OSError, SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, sqlite3.Error) as error:
        raise StoreUnavailable(f"The database cannot be used: {reason(error, url)}.") from error


async def _change(url: URL, work: Callable[[Connection], None]) -> None:
    engine = postgres_engine(url, poolclass=NullPool, connect_args={"timeout": CONNECT_SECONDS})
    try:
        async with engine.begin() as connection:
            # Whatever waits for a lock on a view makes all later statements on it wait, too.
            await connection.execute(text(f"SET LOCAL lock_timeout = '{LOCK_SECONDS * 1000:.0f}ms'"))
            await connection.run_sync(work)
    finally:
        await engine.dispose()


async def _count_connections(url: URL) -> int:
    engine = postgres_engine(url, poolclass=NullPool, connect_args={"timeout": CONNECT_SECONDS})
    ours = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'baton'"
    try:
        async with asyncio.timeout(2 * CONNECT_SECONDS), engine.connect() as connection:
            return int((await connection.execute(text(ours))).scalar_one())
    finally:
        await engine.dispose()


def cause(url: str) -> str | None:
    """Return the reason why a database cannot be used, in words, or None if it can be reached and has a schema that is
    known.

    Must not be called on a thread with a running loop.
    """
    if not exists(url):
        return "the file does not exist; `baton serve` or `baton migrate` makes it"
    try:
        schema = status(url)
    except StoreUnavailable as error:
        return error.message.partition(": ")[2].rstrip(".")
    if schema.newer:
        return f"the database is newer than this program: it has revision {schema.current}, this program {schema.head}"
    if schema.current is None:
        return "it has no tables; run `baton migrate`"
    if schema.is_current:
        return None
    return f"it has the tables of revision {schema.current}; run `baton migrate`"


def statements(url: str, start: str | None, to: str, *, down: bool = False) -> str:
    """Return the SQL that takes a database from one revision to another, without running it."""
    config, command = alembic_config(url), resolve_name("alembic.command")
    config.output_buffer = output = io.StringIO()
    with ONE_AT_A_TIME:
        if down:
            command.downgrade(config, f"{start}:{to}", sql=True)
        else:
            steps = to if start is None else f"{start}:{to}"
            command.upgrade(config, steps, sql=True)
    return output.getvalue().strip()


def is_earlier(url: str, current: str | None, target: str) -> bool:
    """Return True if a revision comes before the current one. Raises `ConfigInvalid` for a revision that does not
    exist."""
    names = [revision.id for revision in _all_revisions(url)]
    if target == "head":
        return False
    if target not in names and target != "base":
        raise ConfigInvalid([f"--to: there is no revision {target}; there are {names[0]} to {names[-1]}, and base"])
    order = ["base", *names]
    return current in order and order.index(target) < order.index(current)


def _all_revisions(url: str) -> Sequence[Revision]:
    """Return every revision that this program knows, the oldest first."""
    scripts: Any = resolve_name("alembic.script:ScriptDirectory").from_config(alembic_config(url))
    revisions = [Revision(revision.revision, revision.doc.partition("\n")[0]) for revision in scripts.walk_revisions()]
    return revisions[::-1]


def _current(url: str) -> str | None:
    parsed = parse_url(url)
    if parsed.get_backend_name() != "sqlite":
        return asyncio.run(_current_on_postgres(parsed))
    if not exists(url):
        return None
    engine = create_engine(parsed, poolclass=NullPool, hide_parameters=True)
    with engine.connect() as connection:
        return revision(connection)


async def _current_on_postgres(url: URL) -> str | None:
    engine = postgres_engine(url, poolclass=NullPool, connect_args={"timeout": CONNECT_SECONDS})
    try:
        async with asyncio.timeout(2 * CONNECT_SECONDS), engine.connect() as connection:
            return await connection.run_sync(revision)
    finally:
        await engine.dispose()
