"""Runs plain functions over a SQLAlchemy connection: on Postgres through asyncpg, on SQLite in the event loop.

The functions are the same for both. Here is how they are carried out, and what a fault of the database means.
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

from app.errors import ConfigInvalid
from app.store.sqlkit.connections import POOLING, Checkout, Connections, pools_transactions, postgres_engine
from app.store.sqlkit.prepared import Row, SingleStatement

T = TypeVar("T")
Reason = Literal["down", "busy", "lost", "contended", "refused", "undecided"]

CONNECT_SECONDS = 2.0
LOCK_SECONDS = 2.0
"""Longest wait for a lock of another transaction."""
WORK_SECONDS = 5.0
"""Longest time for one piece of work, its transaction included."""
READERS = 4
"""Threads that read an SQLite file."""
CHECKPOINT_EVERY = 500
"""Writes after which the write-ahead log is copied into the database file, on a thread."""
NEVER_COMMITTED = ("23", "40")
"""SQLSTATE classes with which a COMMIT is known to have failed: constraint violations, and rollbacks by the server."""
CLOSED = "connection is closed"
"""Part of asyncpg's message for a connection that is closed already."""
BUSY = "cannot switch to state"
"""Part of asyncpg's message for a connection that is being closed. Nothing was sent on it then."""
CONTENDED = frozenset({"40001", "40P01", "23505"})
"""Serialization failure, deadlock, and a row that another transaction inserted between our read and our insert."""
LOST = ("08", "57P01", "57P02", "25006")
"""The connection is broken, the server shuts down or has crashed, or it has become a read-only standby."""
REFUSED = ("22", "23")

AWAY: frozenset[Reason] = frozenset({"down", "lost", "undecided"})
"""Reasons that concern the database and not the work."""


class Fault(Exception):
    """The database did not carry out the work. Unless the reason is `undecided`, nothing was written.

    * `down`: it cannot be reached, or did not answer in time.
    * `busy`: all connections of this process are in use.
    * `lost`: the connection broke before COMMIT; the work may be repeated on another one.
    * `contended`: another transaction was in the way; the work may be repeated.
    * `refused`: it does not accept these values.
    * `undecided`: the answer to COMMIT is missing; `result` is what the work returned.
    """

    def __init__(self, reason: Reason, result: object = None) -> None:
        self.reason = reason
        self.result = result
        super().__init__(reason)


class Runner(Protocol):
    """Carries out work on a connection. Raises `Fault`, and whatever the work itself raises.

    On Postgres a `SingleStatement` is sent without a transaction around it, and commits itself.
    """

    dialect: Dialect

    @property
    def losses(self) -> int:
        """The number of times that connections to the server were lost. Each time it may have been replaced by an older
        copy of itself."""
        ...

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        """Run work that writes nothing. Each of its statements sees what was committed before it.

        `brief` promises that it looks up a single row by its key.
        """
        ...

    async def write(self, work: Callable[[Connection], T], *, meant: object = None) -> T:
        """Run work in one transaction and commit it. `meant` is the result that a
        `SingleStatement` will have: a `Fault` carries it
        if the answer to COMMIT is missing."""
        ...

    async def close(self) -> None:
        """Release connections and threads."""
        ...


def parse_url(text: str) -> URL:
    """The URL that SQLAlchemy needs for a URL as people write it. Raises `ConfigInvalid` for other kinds of URLs.

    `sqlite:///path`, `postgresql://…` and `postgres://…` are accepted, with libpq's `sslmode`, and with `pgbouncer`
    where a PgBouncer is between (see `connections.py`).
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
    if url.query.get(POOLING, "session") not in ("session", "transaction"):
        raise ConfigInvalid([f"database URL: {POOLING} is session or transaction"])
    mode = url.query.get("sslmode")
    return url.difference_update_query(["sslmode"]).update_query_dict({"ssl": mode}) if mode else url


class Postgres:
    """A bounded pool of asyncpg connections. Nothing waits for one of them longer than `CONNECT_SECONDS`."""

    def __init__(self, url: URL, connections: int, work_seconds: float = WORK_SECONDS) -> None:
        settings = {  # in milliseconds
            "lock_timeout": str(int(LOCK_SECONDS * 1000)),
            "statement_timeout": str(int(work_seconds * 1000)),
            "idle_in_transaction_session_timeout": str(int(2 * work_seconds * 1000)),
        }
        self._writing = postgres_engine(
            url,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=CONNECT_SECONDS,
            pool_use_lifo=True,
            hide_parameters=True,  # an error must not carry callers' text into a log
            connect_args={"timeout": CONNECT_SECONDS, "server_settings": {"application_name": "baton"}},
        )
        self._reading = self._writing.execution_options(isolation_level="AUTOCOMMIT")
        self._connections = Connections(self._reading, settings, keeps_statements=not pools_transactions(url))
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
        """Carry out a statement that is its own transaction. `meant` is its result, if the answer is missing."""
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
        """True if a single statement is known not to have been carried out.

        The server said so; or it never received it, because the connection was closed or a value could not be encoded.
        """
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
    """One piece of work and its COMMIT, and how far they have come."""

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
    """Run work on a connection, and close the connection if the work is cancelled.

    A BEGIN that was cancelled may still be on its way. The next user's transaction would then be a savepoint inside of
    it, and its COMMIT a release: reported as written, and never committed. SQLAlchemy takes care of that for its own
    statements, but ours run on the driver's cursor.
    """
    try:
        return work(conn, *args, **named)
    except asyncio.CancelledError:
        conn.invalidate()
        raise


class Sqlite:
    """Writes and brief reads run in the event loop, other reads on a few threads, which write-ahead logging allows.

    A commit is a copy into the page cache and takes a fraction of a millisecond, less than handing it to a thread and
    back (a whole run, one caller, noisy machine: 3.5-4.5 instead of 5.0-6.0 ms; one row: 0.2 instead of 0.6). Work that
    may take long goes to the writer's thread: waiting for another process's lock, and the checkpoint with its fsync. A
    commit survives a kill of the process; `synchronous=NORMAL` may lose the last moments before a power cut, but keeps
    the database consistent.
    """

    def __init__(self, url: URL) -> None:
        self._in_loop = sqlite_engine(url, patience=0.0)
        self._writing = sqlite_engine(url, patience=LOCK_SECONDS)
        self._reading = create_engine(url, hide_parameters=True, pool_size=READERS, max_overflow=0)
        event.listen(self._reading, "connect", partial(_set_pragmas, patience=LOCK_SECONDS))
        self._writer = ThreadPoolExecutor(1, "baton-store-writer")
        self._readers = ThreadPoolExecutor(READERS, "baton-store-reader")
        self._connection: Connection | None = None
        self._unchecked = 0
        self.dialect = self._writing.dialect
        self.losses = 0

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        if brief:
            with suppress(Fault):  # a thread then does it, or reports the fault
                return self._run_in_loop(work, "BEGIN")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._readers, _work, self._reading, work)

    async def write(self, work: Callable[[Connection], T], *, meant: object = None) -> T:
        loop = asyncio.get_running_loop()
        self._unchecked += 1
        if self._unchecked >= CHECKPOINT_EVERY:
            self._unchecked = 0
            self._writer.submit(_checkpoint, self._writing)
        try:
            return self._run_in_loop(work, "BEGIN IMMEDIATE")
        except Fault as fault:
            if not _is_busy(fault.__cause__):
                raise
        return await loop.run_in_executor(self._writer, _work, self._writing, work)

    def _run_in_loop(self, work: Callable[[Connection], T], begin: str) -> T:
        """Run work in the event loop, on one connection: taking one from the pool costs 76 us of then 107."""
        try:
            if self._connection is None:
                self._connection = self._in_loop.connect()
            with _transaction(self._connection, begin):
                return work(self._connection)
        except (SQLAlchemyError, sqlite3.Error) as error:
            if self._connection is not None and not _is_busy(error):
                self._connection.invalidate()
                self._connection.close()
                self._connection = None
            raise Fault(_reason(error, self.dialect)) from error

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is not None:
            self._connection.close()
        self._in_loop.dispose()
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
    """BEGIN and COMMIT on the driver's own connection, which takes 7 us instead of 31 through SQLAlchemy.

    Work that uses Core joins this transaction, because `_begin_immediate` begins none inside of it.
    """
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
    connection.isolation_level = None  # the driver begins no transaction by itself
    # This module makes the checkpoints: a commit waits for an fsync only if the log has grown to 256 MiB.
    pragmas = (
        f"busy_timeout={int(patience * 1000)}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        "wal_autocheckpoint=65536",
    )
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")


def _is_busy(error: BaseException | None) -> bool:
    """True if the only fault is that another connection has the lock."""
    cause = getattr(error, "orig", None) or error
    return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY


def _checkpoint(engine: Engine) -> None:
    """Copy the log into the database file, as far as readers allow. If that fails, the next one will do it."""
    with suppress(SQLAlchemyError, sqlite3.Error), engine.connect() as conn:
        conn.connection.cursor().execute("PRAGMA wal_checkpoint(PASSIVE)")


def _begin_immediate(conn: Connection) -> None:
    raw: sqlite3.Connection = conn.connection.driver_connection  # type: ignore[assignment]
    if not raw.in_transaction:
        raw.execute("BEGIN IMMEDIATE")


def _reason(error: Exception, dialect: Dialect) -> Reason:
    """The reason of a fault, from the driver's error. SQLAlchemy may have wrapped it."""
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
    """The runner for a URL. It connects when first used, so that a process can start while its database is down."""
    parsed = parse_url(url)
    return Sqlite(parsed) if parsed.get_backend_name() == "sqlite" else Postgres(parsed, connections)
