"""Migrates a database to this version's schema. The versions are in `migrations/`, next to the package.

Alembic is imported when it is first used: it is a twelfth of a process's imports, and most processes never use it. A
Postgres is migrated by `baton migrate` alone, and an SQLite file that has the newest schema is left alone.
"""

import socket
import sqlite3
import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import asyncpg
from sqlalchemy import Connection, inspect, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from app.errors import StoreUnavailable
from app.store.sqlkit.runner import parse_url

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).resolve().parents[3] / "migrations"
REASONS: Mapping[type[BaseException], str] = {
    asyncpg.InvalidPasswordError: "the password of the user {user} is wrong",
    asyncpg.InvalidAuthorizationSpecificationError: "the server does not accept the user {user} from here",
    asyncpg.InvalidCatalogNameError: "the server has no database {database}; create it first",
    asyncpg.InsufficientPrivilegeError: "the user {user} lacks a privilege on the database {database}",
    asyncpg.TooManyConnectionsError: "the server has no connection left",
    asyncpg.CannotConnectNowError: "the server is starting, stopping or recovering",
    asyncpg.LockNotAvailableError: "another transaction holds a lock that this change needs; try again",
    socket.gaierror: "the host name {host} is unknown",
    ConnectionRefusedError: "nothing listens on {place}",
    ConnectionResetError: "{place} has closed the connection",
    ConnectionError: "{place} refuses TLS, which the URL demands",
    TimeoutError: "{place} does not answer in time",
    PermissionError: "this user may not open {database}",
}
"""The reasons of faults. The first class that fits counts, so subclasses come before their bases."""
ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its context in globals. Processes exclude each other by a lock in the database."""


def migrate(url: str, to: str = "head", *, up: bool = False) -> None:
    """Upgrade a database to the newest revision, or downgrade it to another one; with `up`, upgrade it to that one.

    Must not be called on a thread with a running loop.
    Safe to call from several processes at once: the first one does the work while the others wait. Raises
    `StoreUnavailable` if the database cannot be reached or refuses.
    """
    if to == "head" and _is_newest_file(parse_url(url)):
        return
    config, command = alembic_config(url), resolve_name("alembic.command")
    with ONE_AT_A_TIME, _faults_as_unavailable(config.attributes["url"]):
        _make_folder(config.attributes["url"])
        if up or to == "head":
            command.upgrade(config, to)
        else:
            command.downgrade(config, to)


def newest() -> str:
    """Return the newest revision that this program knows, by the names of its files: a process of the service does
    without Alembic."""
    return max(path.name.partition("_")[0] for path in (MIGRATIONS / "versions").glob("[0-9]*.py"))


def revision(conn: Connection) -> str | None:
    """Return the revision of a database's schema; None without tables."""
    if not inspect(conn).has_table("alembic_version"):
        return None
    number: str | None = conn.execute(text("SELECT version_num FROM alembic_version")).scalar_one_or_none()
    return number


def _is_newest_file(url: URL) -> bool:
    """Return True for an SQLite file that has the newest schema. Whatever keeps it from being read, Alembic reports."""
    if url.get_backend_name() != "sqlite" or not Path(url.database or "").is_file():
        return False
    with suppress(sqlite3.Error), closing(sqlite3.connect(str(url.database), timeout=0)) as file:
        return file.execute("SELECT version_num FROM alembic_version").fetchall() == [(newest(),)]
    return False


def _make_folder(url: URL) -> None:
    """Make the folder of an SQLite file, for its owner alone; SQLite itself makes the file only."""
    if url.get_backend_name() == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True, mode=0o700)


@contextmanager
def _faults_as_unavailable(url: URL) -> Iterator[None]:
    """Raise `StoreUnavailable` with the reason for a fault of the driver or of Alembic."""
    command_error: type[Exception] = resolve_name("alembic.util.exc:CommandError")
    try:
        yield
    except (OSError, SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, command_error) as error:
        raise StoreUnavailable(f"The database cannot be used: {reason(error, url)}.") from error


def reason(error: BaseException, url: URL) -> str:
    """Return the reason of a fault in words, without a password and without the text of a statement."""
    cause = getattr(error, "orig", None) or error
    for exception in (cause, cause.__cause__, error):
        for kind, words in REASONS.items():
            if isinstance(exception, kind):
                return words.format(database=url.database, user=url.username, host=url.host, place=_place(url))
    if "Can't locate revision" in str(error):
        return "the database is newer than this program; use the version of Baton that has migrated it"
    if isinstance(cause, sqlite3.Error):
        return f"SQLite says: {cause}"
    return f"it refuses ({type(cause).__name__})"


def _place(url: URL) -> str:
    """Return the addresses of a URL; several stand in its query."""
    several = url.normalized_query.get("host", ())
    if several:
        return " or ".join(several)
    return f"{url.host or 'localhost'}:{url.port or 5432}"


def alembic_config(url: str) -> "Config":
    """Return the configuration with which Alembic's commands work on a database."""
    config: Config = resolve_name("alembic.config:Config")()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["url"] = parse_url(url)
    return config
