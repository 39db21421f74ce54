"""Carrying out plain functions over a SQLAlchemy connection: the promises of a runner, and the faults of a database.

`postgres.py` and `sqlite.py` have the runners.
"""

from collections.abc import Callable
from typing import Literal, Protocol, TypeVar

import asyncpg
from sqlalchemy import Connection, Dialect
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError
from sqlalchemy.exc import TimeoutError as PoolTimeout

from app.errors import ConfigInvalid
from app.telemetry import PoolUse

T = TypeVar("T")
Reason = Literal["down", "slow", "overlong", "busy", "lost", "contended", "refused", "foreign", "undecided"]

LOCK_SECONDS = 2.0
"""Longest wait for a lock of another transaction."""
POOLING = "pgbouncer"
"""Parameter of the URL that says how PgBouncer pools: `session`, which is no different from no PgBouncer at all, or
`transaction`."""
URL_FAULT = "BATON_DATABASE_URL: is not a URL that Baton can use; write sqlite:///path or postgresql://user@host/name"
URL_PARAMETERS = frozenset(
    "host port user password ssl sslmode direct_tls target_session_attrs passfile service servicefile krbsrvname gsslib"
    f" prepared_statement_cache_size {POOLING}".split()
)
"""The parameters that the URL of a Postgres may have: those of asyncpg that are text, and those that are read here."""
CLOSED = "connection is closed"
"""Part of asyncpg's message for a connection that is closed already."""
CONTENDED = frozenset({"40001", "40P01", "23505"})
"""Serialization failure, deadlock, and a row that another transaction inserted between our read and our insert."""
LOST = ("08", "57P01", "57P02", "25006")
"""The connection is broken, the server shuts down or has crashed, or it has become a read-only standby."""
REFUSED = ("22", "23")
NO_RIGHT = "42501"
"""The user does not have the right, or row-level security refuses a row."""

AWAY: frozenset[Reason] = frozenset({"down", "lost", "undecided"})
"""Reasons that concern the database and not the work."""


class Fault(Exception):
    """The database did not carry out the work. Unless the reason is `undecided`, nothing was written.

    * `down`: it cannot be reached, or did not answer in time.
    * `slow`: a new connection did not open in time, as on a machine without CPU to spare, or the server had none left,
      as when it still counts those that were lost; but it has answered others meanwhile. The work may be repeated.
    * `overlong`: it was not done in the time that work may take; but the server has answered others meanwhile.
    * `busy`: all connections of this process are in use.
    * `lost`: the connection broke before COMMIT; the work may be repeated on another one.
    * `contended`: another transaction was in the way; the work may be repeated.
    * `refused`: it does not accept these values.
    * `foreign`: row-level security refuses the row, which is another tenant's.
    * `undecided`: the answer to COMMIT is missing; `result` is what the work returned.
    """

    def __init__(self, reason: Reason, result: object = None) -> None:
        self.reason = reason
        self.result = result
        super().__init__(reason)

    def describe_cause(self) -> str:
        """Return what the driver said, without the statement and its values; empty if it said nothing."""
        cause: BaseException = self
        while cause.__cause__ is not None:
            cause = cause.__cause__
        if cause is self:
            return ""
        first_line = next(iter(str(cause).splitlines()), "")
        return f"{type(cause).__name__}: {first_line}".removesuffix(": ")


class Runner(Protocol):
    """Carries out work on a connection. Raises `Fault`, and whatever the work itself raises.

    On Postgres a `SingleStatement` is sent without a transaction around it, and commits itself.
    """

    dialect: Dialect

    @property
    def losses(self) -> int:
        """Return the number of times that connections to the server were lost. Each time it may have been replaced by
        an older copy of itself."""
        ...

    @property
    def server_changes(self) -> int:
        """Return the number of times that a connection led to another server than before, which is an older copy
        perhaps; 0 for SQLite. All fences were raised then (see `generation.py`)."""
        ...

    @property
    def pool_use(self) -> PoolUse:
        """Return the use of the connections on which work has to wait for its turn."""
        ...

    @property
    def isolates_tenants(self) -> bool:
        """Return True if the database itself can keep a read to the rows of one tenant."""
        ...

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False, tenant: str | None = None) -> T:
        """Run work that writes nothing. Each of its statements sees what was committed before it.

        `brief` promises that it looks up a single row by its key. With a `tenant` the work sees only the rows of that
        tenant where the database can see to it (`row_security.py`).
        """
        ...

    async def write(
        self, work: Callable[[Connection], T], *, expected_result: object = None, tenant: str | None = None
    ) -> T:
        """Run work in one transaction and commit it.

        `expected_result` is the result that a `SingleStatement` will have: a `Fault` carries it if the answer to COMMIT
        is missing. With a `tenant` the work, which is no `SingleStatement`, sees and changes only the rows of that
        tenant where the database can see to it (`row_security.py`).
        """
        ...

    async def empty_log(self) -> bool:
        """Copy the whole write-ahead log into the database file, and cut the log to nothing.

        False if a reader was in the way, and on Postgres, whose server keeps its log itself.
        """
        ...

    async def overwrite_erased(self) -> bool:
        """Remove what was erased from the files, and empty the log.

        False if a reader was in the way, or the file is too large; and on Postgres (deploy/docs/erasing.md).
        """
        ...

    async def close(self) -> None:
        """Release connections and threads."""
        ...


def parse_url(text: str) -> URL:
    """Return the URL that SQLAlchemy needs for a URL as people write it. Raises `ConfigInvalid` for other kinds of
    URLs.

    `sqlite:///path`, `postgresql://…` and `postgres://…` are accepted, with libpq's `sslmode`, and with `pgbouncer`
    where a PgBouncer is between (see `postgres.py`).
    """
    try:
        url = make_url(text)
    except (ArgumentError, ValueError):  # a port that is no number is a ValueError
        raise ConfigInvalid([URL_FAULT]) from None
    kind = url.drivername.partition("+")[0]
    if kind == "sqlite" and url.database and url.database != ":memory:":
        return url.set(drivername="sqlite+pysqlite")
    if kind not in {"postgres", "postgresql"} or not 0 < (url.port or 5432) < 1 << 16:
        raise ConfigInvalid([URL_FAULT])
    unknown = sorted(url.query.keys() - URL_PARAMETERS)
    if unknown:
        raise ConfigInvalid([f"BATON_DATABASE_URL: Baton does not know the parameter {unknown[0]}; remove it"])
    url = url.set(drivername="postgresql+asyncpg")
    if url.query.get(POOLING, "session") not in ("session", "transaction"):
        raise ConfigInvalid([f"BATON_DATABASE_URL: {POOLING} must be session or transaction; correct it"])
    mode = url.query.get("sslmode")
    if mode:
        return url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode})
    return url


def reason_of(error: Exception, dialect: Dialect) -> Reason:
    """Return the reason of a fault, from the driver's error. SQLAlchemy may have wrapped it."""
    cause = getattr(error, "orig", None) or error
    driver = dialect.loaded_dbapi
    state = sqlstate(error)
    if isinstance(error, PoolTimeout):
        return "busy"
    if state in CONTENDED:
        return "contended"
    if state == NO_RIGHT and "row-level security" in str(cause):
        return "foreign"
    is_closed = isinstance(cause, asyncpg.InterfaceError) and CLOSED in str(cause)
    if (
        state.startswith(LOST)
        or is_closed
        or (isinstance(cause, driver.Error) and dialect.is_disconnect(cause, connection=None, cursor=None))
    ):
        return "lost"
    is_refused = state.startswith(REFUSED) or isinstance(cause, driver.IntegrityError)
    if is_refused or isinstance(cause.__cause__, asyncpg.DataError):
        return "refused"
    return "down"


def sqlstate(error: Exception) -> str:
    return str(getattr(getattr(error, "orig", None) or error, "sqlstate", None) or "")
