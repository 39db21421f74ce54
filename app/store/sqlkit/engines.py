"""Two ways to run a plain function over a SQLAlchemy connection: Postgres through asyncpg, SQLite in the loop.

What the functions do is the same for both; here is only how they are carried out, and what a database's fault means.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Concatenate, Literal, ParamSpec, Protocol, TypeVar

import asyncpg
from sqlalchemy import Connection, Dialect, Engine, Transaction, create_engine, event
from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError, SQLAlchemyError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import create_async_engine

from app.errors import ConfigInvalid
from app.store.sqlkit.connections import Checkout, Connections
from app.store.sqlkit.prepared import Row, SingleStatement

T = TypeVar("T")
Reason = Literal["down", "busy", "lost", "contended", "refused", "undecided"]

CONNECT_SECONDS = 2.0
LOCK_SECONDS = 2.0
WORK_SECONDS = 5.0
READERS = 4
CHECKPOINT_EVERY = 500
"""WriteStatements after which the write-ahead log is copied into the database file, beside the work."""
BY_KEY = {
    "plan_cache_mode": "force_generic_plan",
    "enable_seqscan": "off",
    "enable_hashjoin": "off",
    "enable_mergejoin": "off",
    "jit": "off",
}
"""How a Postgres is to plan: once for each statement, and by the index. All that we ask for often is found by its key;
but left to itself it plans a write anew each time (half a millisecond), or goes by what it saw of a table that was
still empty, through all of it, when it is not any more."""
NEVER_COMMITTED = ("23", "40")
"""SQLSTATE classes with which a COMMIT is known to have failed: constraint violations, and rollbacks by the server."""


CLOSED = "connection is closed"
"""What asyncpg says of a connection that is closed already."""
BUSY = "cannot switch to state"
"""What asyncpg says of a connection that is just being closed, before it sends anything."""
CONTENDED = frozenset({"40001", "40P01", "23505"})
"""Serialization failure, deadlock, and a row that somebody else inserted between our look and our insert."""
LOST = ("08", "57P01", "57P02", "25006")
"""The connection is broken, the server shuts down or crashes, or it has become a read-only standby."""
REFUSED = ("22", "23")

AWAY: frozenset[Reason] = frozenset({"down", "lost", "undecided"})
"""What speaks of the database, and not of what it was asked."""


class Fault(Exception):
    """The database did not do what was asked; `reason` says what may be done about it.

    `down`: it cannot be reached or did not answer in time. `busy`: all of our connections are checkout. `lost`: the
    connection broke before COMMIT, so a new one may be tried. `contended`: somebody else was in the way, the same work
    may be tried again. `refused`: it does not take these values. `undecided`: the answer to COMMIT is missing;
    `result` is what the work returned. But for the last, nothing was written.
    """

    def __init__(self, reason: Reason, result: object = None) -> None:
        self.reason = reason
        self.result = result
        super().__init__(reason)


class Runner(Protocol):
    """Carries out work on a connection. Raises `Fault`, and what the work itself raises.

    On a server an `SingleStatement` is sent as the one statement that it is, which commits itself.
    """

    dialect: Dialect

    @property
    def losses(self) -> int:
        """The number of times that connections to the server were lost. Each time it may have been replaced by an older
        copy of itself."""
        ...

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        """Run work that writes nothing; each of its statements sees what was committed before it. `brief` says that it
        looks up one row by its key."""
        ...

    async def write(self, work: Callable[[Connection], T], *, meant: object = None) -> T:
        """Run work in one transaction and commit it. `meant` is the result that a
        `SingleStatement` will have: a `Fault` carries it
        if the answer to COMMIT is missing."""
        ...

    async def close(self) -> None:
        """Let go of connections and threads."""
        ...


def parse_url(text: str) -> URL:
    """The URL that SQLAlchemy needs for a URL as people write it; `ConfigInvalid` says what can be written.

    `sqlite:///path`, `postgresql://…` and `postgres://…` are accepted, with libpq's `sslmode`.
    """
    try:
        url = make_url(text)
    except ArgumentError:
        raise ConfigInvalid(["database URL: write sqlite:///path or postgresql://user@host/name"]) from None
    kind = url.drivername.partition("+")[0]
    if kind == "sqlite" and url.database and url.database != ":memory:":
        return url.set(drivername="sqlite+pysqlite")
    if kind not in {"postgres", "postgresql"}:
        raise ConfigInvalid(["database URL: write sqlite:///path or postgresql://user@host/name"])
    url = url.set(drivername="postgresql+asyncpg")
    mode = url.query.get("sslmode")
    return url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode}) if mode else url


class Postgres:
    """A bounded pool of asyncpg connections; nothing waits for one longer than two seconds."""

    def __init__(self, url: URL, connections: int, work_seconds: float = WORK_SECONDS) -> None:
        settings = {
            "application_name": "baton",
            "lock_timeout": str(int(LOCK_SECONDS * 1000)),
            "statement_timeout": str(int(work_seconds * 1000)),
            "idle_in_transaction_session_timeout": str(int(2 * work_seconds * 1000)),
            **BY_KEY,
        }
        self._writing = create_async_engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=CONNECT_SECONDS,
            pool_use_lifo=True,
            hide_parameters=True,  # an error must not carry callers' text into a log
            connect_args={"timeout": CONNECT_SECONDS, "server_settings": settings},
        )
        self._reading = self._writing.execution_options(isolation_level="AUTOCOMMIT")
        self._connections = Connections(self._reading)
        self._seconds = work_seconds
        self.dialect = self._writing.dialect
        self._faults = (
            SQLAlchemyError,
            OSError,
            asyncpg.PostgresError,
            asyncpg.InterfaceError,
            asyncpg.InternalClientError,
            self.dialect.loaded_dbapi.Error,
        )

    @property
    def losses(self) -> int:
        return self._connections.losses

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        if isinstance(work, SingleStatement):
            return await self._send(work)
        try:
            async with asyncio.timeout(self._seconds), self._connections.connect(self._reading) as conn:
                return await conn.run_sync(partial(_whole, work))
        except self._faults as error:
            raise self._fault(error) from error

    async def write(self, work: Callable[[Connection], T], *, meant: object = None) -> T:
        if isinstance(work, SingleStatement):
            return await self._send(work, meant)
        transaction = _Transaction(work)
        try:
            async with asyncio.timeout(self._seconds), self._connections.connect(self._writing) as conn:
                await conn.run_sync(transaction.run)
        except self._faults as error:
            if transaction.phase == "work":
                raise self._fault(error) from error
            if transaction.phase == "commit":
                raise self._fault(error, transaction.result) from error
        result: T = transaction.result
        return result

    async def close(self) -> None:
        await self._connections.close()

    async def _send(self, statement: SingleStatement[T], meant: object = None) -> T:
        """A statement that is its own transaction; one that writes is its own COMMIT."""
        limit = asyncio.get_running_loop().time() + self._seconds
        try:
            checkout = await self._connections.take(limit)
        except self._faults as error:
            raise self._fault(error) from error
        try:
            rows = await self._answer(statement, checkout, limit)
        except self._faults as error:
            raise self._fault(error, None if self._undid(error) else meant) from error
        return statement.made(rows)

    async def _answer(self, statement: SingleStatement[T], checkout: Checkout, limit: float) -> Sequence[Row]:
        try:
            rows = await statement.statement.sent(checkout.connection, statement.values, limit)
        except BaseException as error:
            await self._connections.drop(checkout, error)
            raise
        await self._connections.give(checkout)
        return rows

    def _undid(self, error: Exception) -> bool:
        """Whether a statement that stands alone is known not to have been carried out: the server said so, or never
        got it, because the connection was found closed, or the driver could not encode a value."""
        causes = (error, error.__cause__, getattr(error, "orig", None))
        unsent = any(isinstance(cause, asyncpg.InterfaceError) or BUSY in str(cause) for cause in causes)
        return unsent or (bool(_sqlstate(error)) and _reason(error, self.dialect) != "lost")

    def _fault(self, error: Exception, unanswered: object = None) -> Fault:
        reason = _reason(error, self.dialect)
        if reason == "lost":
            self._connections.lost()
        if unanswered is not None and not _sqlstate(error).startswith(NEVER_COMMITTED):
            return Fault("undecided", unanswered)
        return Fault(reason)


@dataclass(slots=True)
class _Transaction:
    """One piece of work and its COMMIT, and how far they got."""

    work: Callable[[Connection], object]
    result: Any = None
    phase: Literal["work", "commit", "done"] = "work"

    def run(self, conn: Connection) -> None:
        with conn.begin() as transaction:
            _whole(self._work, conn, transaction)

    def _work(self, conn: Connection, transaction: Transaction) -> None:
        self.result = self.work(conn)
        self.phase = "commit"
        transaction.commit()
        self.phase = "done"


P = ParamSpec("P")


def _whole(work: Callable[Concatenate[Connection, P], T], conn: Connection, *args: P.args, **named: P.kwargs) -> T:
    """Work on a connection that nobody uses again if it is broken off.

    A BEGIN that was given up may still be under way. On the next one's transaction it would make a savepoint of what
    SQLAlchemy and asyncpg take for a transaction, and of its COMMIT a release: told as written, and never committed.
    SQLAlchemy sees to it itself for what goes through it, but our statements run on the driver's own cursor.
    """
    try:
        return work(conn, *args, **named)
    except asyncio.CancelledError:
        conn.invalidate()
        raise


class Sqlite:
    """Writes and brief reads in the event loop, other reads beside it on a few threads, which write-ahead logging
    allows.

    A commit here is a copy into the page cache and takes a fraction of a millisecond, less than handing it to a thread
    and back (a whole run, one caller, noisy machine: 3.5-4.5 instead of 5.0-6.0 ms; one row: 0.2 instead of 0.6). What
    can take long goes to the writer's thread: waiting for another process's lock, and the checkpoint with its fsync. A
    commit survives the death of the process; `synchronous=NORMAL` gives up the last moments before a power cut, never
    consistency.
    """

    def __init__(self, url: URL) -> None:
        self._here = sqlite_engine(url, patience=0.0)
        self._writing = sqlite_engine(url, patience=LOCK_SECONDS)
        self._reading = create_engine(url, hide_parameters=True, pool_size=READERS, max_overflow=0)
        event.listen(self._reading, "connect", partial(_set_pragmas, patience=LOCK_SECONDS))
        self._writer = ThreadPoolExecutor(1, "baton-store-writer")
        self._readers = ThreadPoolExecutor(READERS, "baton-store-reader")
        self._kept: Connection | None = None
        self._unchecked = 0
        self.dialect = self._writing.dialect
        self.losses = 0

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        if brief:
            with suppress(Fault):  # the other way says what is wrong, or gets it done
                return self._here_and_now(work, "BEGIN")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, _work, self._reading, work)

    async def write(self, work: Callable[[Connection], T], *, meant: object = None) -> T:
        loop = asyncio.get_running_loop()
        self._unchecked += 1
        if self._unchecked >= CHECKPOINT_EVERY:
            self._unchecked = 0
            self._writer.submit(_checkpoint, self._writing)
        try:
            return self._here_and_now(work, "BEGIN IMMEDIATE")
        except Fault as fault:
            if not _is_busy(fault.__cause__):
                raise
        return await loop.run_in_executor(self._writer, _work, self._writing, work)

    def _here_and_now(self, work: Callable[[Connection], T], begin: str) -> T:
        """On a connection that is kept: taking one from the pool costs more than the transaction (76 us of 107)."""
        try:
            if self._kept is None:
                self._kept = self._here.connect()
            with _transaction(self._kept, begin):
                return work(self._kept)
        except (SQLAlchemyError, sqlite3.Error) as error:
            if self._kept is not None and not _is_busy(error):
                self._kept.invalidate()
                self._kept.close()
                self._kept = None
            raise Fault(_reason(error, self.dialect)) from error

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._kept is not None:
            self._kept.close()
        self._here.dispose()
        await loop.run_in_executor(self._writer, self._writing.dispose)
        await loop.run_in_executor(self._readers, self._reading.dispose)
        self._writer.shutdown()
        self._readers.shutdown()


def sqlite_engine(url: URL, *, patience: float = LOCK_SECONDS) -> Engine:
    """An engine whose transactions take the write lock when they begin, so that none has to be undone half-way.

    `patience` is how many seconds it waits for that lock.
    """
    engine = create_engine(url, hide_parameters=True)
    event.listen(engine, "connect", partial(_set_pragmas, patience=patience))
    event.listen(engine, "begin", _begin_immediate)
    return engine


@contextmanager
def _transaction(conn: Connection, begin: str) -> Iterator[None]:
    """BEGIN and COMMIT on the driver's own connection: through SQLAlchemy they cost four times as much (31 us against
    7). Work that uses Core finds a transaction going on, which `_begin_immediate` lets it join."""
    raw: sqlite3.Connection = conn.connection.driver_connection  # type: ignore[assignment]
    raw.execute(begin)
    try:
        yield
        conn.commit() if conn.in_transaction() else raw.execute("COMMIT")
    except BaseException:
        conn.rollback() if conn.in_transaction() else raw.rollback()
        raise


def _work(engine: Engine, work: Callable[[Connection], T]) -> T:
    try:
        with engine.begin() as conn:
            return work(conn)
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise Fault(_reason(error, engine.dialect)) from error


def _set_pragmas(connection: Any, _record: object, *, patience: float) -> None:
    connection.isolation_level = None  # the driver opens no transactions by itself
    # Checkpoints are ours: a commit never waits for an fsync, unless the log has grown beyond all bounds (256 MiB).
    pragmas = (
        f"busy_timeout={int(patience * 1000)}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "wal_autocheckpoint=65536",
    )
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")


def _is_busy(error: BaseException | None) -> bool:
    """Whether it was only another connection's lock that was in the way."""
    cause = getattr(error, "orig", None) or error
    return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _checkpoint(engine: Engine) -> None:
    """Copy the log into the database file, as far as readers allow. Whatever hinders it now will not the next time."""
    with suppress(SQLAlchemyError, sqlite3.Error), engine.connect() as conn:
        conn.connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")


def _begin_immediate(conn: Connection) -> None:
    raw: sqlite3.Connection = conn.connection.driver_connection  # type: ignore[assignment]
    if not raw.in_transaction:
        raw.execute("BEGIN IMMEDIATE")


def _reason(error: Exception, dialect: Dialect) -> Reason:
    """What the driver's error means; SQLAlchemy's wrapping, where there is one, is checkout off first."""
    cause = getattr(error, "orig", None) or error
    driver = dialect.loaded_dbapi
    state = _sqlstate(error)
    if isinstance(error, PoolTimeout):
        return "busy"
    if state in CONTENDED:
        return "contended"
    closed = isinstance(cause, asyncpg.InterfaceError) and CLOSED in str(cause)
    if (
        state.startswith(LOST)
        or closed
        or (isinstance(cause, driver.Error) and dialect.is_disconnect(cause, None, None))
    ):
        return "lost"
    refused = state.startswith(REFUSED) or isinstance(cause, driver.IntegrityError)
    return "refused" if refused or isinstance(cause.__cause__, asyncpg.DataError) else "down"


def _sqlstate(error: Exception) -> str:
    return str(getattr(getattr(error, "orig", None) or error, "sqlstate", None) or "")


def open_runner(url: str, connections: int) -> Runner:
    """The runner for a URL. It connects when first used: a database that is down keeps no process from starting."""
    parsed = parse_url(url)
    return Sqlite(parsed) if parsed.get_backend_name() == "sqlite" else Postgres(parsed, connections)
