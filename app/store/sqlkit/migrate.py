"""Migrates a database to this version's schema. The versions are in `migrations/`, next to the package.

Alembic is imported when it is first used: it is a twelfth of a process's imports, and gateways and dispatchers never
use it, because `baton migrate` has migrated their Postgres.
"""

import io
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING

import asyncpg
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from app.errors import StoreUnavailable
from app.store.sqlkit.runner import parse_url

if TYPE_CHECKING:
    from alembic.config import Config

MIGRATIONS = Path(__file__).resolve().parents[3] / "migrations"
ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its context in globals. Processes exclude each other by a lock in the database."""


def migrate(url: str, to: str = "head") -> None:
    """Upgrade (or, to an earlier revision, downgrade) a database. Must not be called on a thread with a running loop.

    Safe to call from several processes at once: the first one does the work while the others wait. Raises
    `StoreUnavailable` if the database cannot be reached or refuses.
    """
    config, command = alembic_config(url), resolve_name("alembic.command")
    with ONE_AT_A_TIME, _faults_as_unavailable():
        _make_folder(config.attributes["url"])
        if to == "head":
            command.upgrade(config, to)
        else:
            command.downgrade(config, to)


def is_current(url: str) -> bool:
    """True if a database has exactly this version's schema. The conditions of `migrate` hold."""
    config, command = alembic_config(url), resolve_name("alembic.command")
    config.stdout = io.StringIO()
    with ONE_AT_A_TIME, _faults_as_unavailable():
        try:
            command.current(config, check_heads=True)
        except resolve_name("alembic.util.exc:DatabaseNotAtHead"):
            return False
    return True


def _make_folder(url: URL) -> None:
    """Make the folder of an SQLite file; SQLite itself makes the file only."""
    if url.get_backend_name() == "sqlite" and url.database:
        Path(url.database).parent.mkdir(parents=True, exist_ok=True)


@contextmanager
def _faults_as_unavailable() -> Iterator[None]:
    """Raise `StoreUnavailable` for a fault of the driver or of Alembic.

    It names the type of the fault only, because the text may hold an address or a statement.
    """
    refused: type[Exception] = resolve_name("alembic.util.exc:CommandError")
    try:
        yield
    except (OSError, SQLAlchemyError, asyncpg.PostgresError, asyncpg.InterfaceError, refused) as error:
        cause = getattr(error, "orig", None) or error
        raise StoreUnavailable(f"The database cannot be reached or refuses ({type(cause).__name__}).") from error


def alembic_config(url: str) -> "Config":
    """The configuration with which Alembic's commands work on a database."""
    config: Config = resolve_name("alembic.config:Config")()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["url"] = parse_url(url)
    return config
