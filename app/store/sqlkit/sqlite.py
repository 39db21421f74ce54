"""Runs plain functions over a SQLAlchemy connection on SQLite: in the event loop, or on a few threads."""

import asyncio
import sqlite3
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

from sqlalchemy import Connection, Engine, create_engine, event
from sqlalchemy.engine import URL
from sqlalchemy.exc import SQLAlchemyError

from app.store.sqlkit.runner import LOCK_SECONDS, Fault, reason_of
from app.telemetry import PoolUse

T = TypeVar("T")

READERS = 4
"""Threads that read an SQLite file."""
CHECKPOINT_EVERY = 200
"""Writes after which the write-ahead log is copied into the database file, on a thread."""
REWRITTEN_BYTES = 64 * 2**20
"""The largest file that is written anew behind an erasure; writers wait meanwhile."""
LOG_BYTES = 16 * 2**20
"""Size of the write-ahead log from which a commit copies it into the database file itself: what happens where single
writes are large, or where readers kept the thread from doing it."""
PAGE_BYTES = 4096
"""Size of a page of the files that this program makes; SQLite's default."""


class Sqlite:
    """Writes and brief reads run in the event loop, other reads on a few threads, which write-ahead logging allows.

    A commit is a copy into the page cache and takes a fraction of a millisecond, less than handing it to a thread and
    back (a whole run, one caller, noisy machine: 3.5-4.5 instead of 5.0-6.0 ms; one row: 0.2 instead of 0.6). Work that
    may take long goes to the writer's thread: waiting for another process's lock, and the checkpoint with its fsync. A
    commit survives a kill of the process; `synchronous=NORMAL` may lose the last moments before a power cut, but keeps
    the database consistent.
    """

    def __init__(self, url: URL) -> None:
        self._loop_engine = sqlite_engine(url, patience=0.0)
        self._writing = sqlite_engine(url, patience=LOCK_SECONDS)
        self._reading = create_engine(url, hide_parameters=True, pool_size=READERS, max_overflow=0)
        event.listen(self._reading, "connect", partial(_set_pragmas, patience=LOCK_SECONDS))
        self._writer = ThreadPoolExecutor(1, "baton-store-writer")
        self._readers = ThreadPoolExecutor(READERS, "baton-store-reader")
        self._connection: Connection | None = None
        self._writes_since_checkpoint = 0
        self._reads = self._waits = 0
        self.dialect = self._writing.dialect
        self.losses = 0
        self.server_changes = 0

    @property
    def isolates_tenants(self) -> bool:
        return False

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False, tenant: str | None = None) -> T:
        if brief:
            with suppress(Fault):  # a thread then does it, or reports the fault
                return self._run_in_loop(work, "BEGIN")
        loop = asyncio.get_running_loop()
        self._waits += self._reads >= READERS
        self._reads += 1
        try:
            return await loop.run_in_executor(self._readers, _run_in_transaction, self._reading, work)
        finally:
            self._reads -= 1

    @property
    def pool_use(self) -> PoolUse:
        return PoolUse(min(self._reads, READERS), READERS, max(self._reads - READERS, 0), self._waits)

    async def write(
        self, work: Callable[[Connection], T], *, expected_result: object = None, tenant: str | None = None
    ) -> T:
        loop = asyncio.get_running_loop()
        self._writes_since_checkpoint += 1
        if self._writes_since_checkpoint >= CHECKPOINT_EVERY:
            self._writes_since_checkpoint = 0
            self._writer.submit(_checkpoint, self._writing)
        try:
            return self._run_in_loop(work, "BEGIN IMMEDIATE")
        except Fault as fault:
            if _has_code(fault.__cause__, sqlite3.SQLITE_FULL):  # the log's pages may fit into the database's file
                await self.empty_log()
            elif not _is_busy(fault.__cause__):
                raise
        return await loop.run_in_executor(self._writer, _run_in_transaction, self._writing, work)

    def _run_in_loop(self, work: Callable[[Connection], T], begin: str) -> T:
        """Run work in the event loop, on one connection: taking one from the pool costs 76 us of then 107."""
        try:
            if self._connection is None:
                self._connection = self._loop_engine.connect()
            with _transaction(self._connection, begin):
                return work(self._connection)
        except (SQLAlchemyError, sqlite3.Error) as error:
            if self._connection is not None and not _is_busy(error):
                self._connection.invalidate()
                self._connection.close()
                self._connection = None
            raise Fault(reason_of(error, self.dialect)) from error

    async def empty_log(self) -> bool:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._writer, _checkpoint, self._writing, "TRUNCATE")

    async def overwrite_erased(self) -> bool:
        loop = asyncio.get_running_loop()
        is_rewritten = await loop.run_in_executor(self._writer, _rewrite, self._writing)
        return await self.empty_log() and is_rewritten

    async def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is not None:
            self._connection.close()
        self._loop_engine.dispose()
        await loop.run_in_executor(self._writer, self._writing.dispose)
        await loop.run_in_executor(self._readers, self._reading.dispose)
        self._writer.shutdown()
        self._readers.shutdown()


def sqlite_engine(url: URL, *, patience: float = LOCK_SECONDS) -> Engine:
    """Return an engine whose transactions take the write lock when they begin, so that none has to be undone half-way.

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
        if conn.in_transaction():
            conn.commit()
        else:
            raw.execute("COMMIT")
    except BaseException:
        if conn.in_transaction():
            conn.rollback()
        else:
            raw.rollback()
        raise


def _run_in_transaction(engine: Engine, work: Callable[[Connection], T]) -> T:
    try:
        with engine.begin() as conn:
            return work(conn)
    except (SQLAlchemyError, sqlite3.Error) as error:
        raise Fault(reason_of(error, engine.dialect)) from error


def _set_pragmas(connection: Any, _record: object, *, patience: float) -> None:
    connection.isolation_level = None  # the driver begins no transaction by itself
    # This module makes the checkpoints: a commit waits for an fsync only if the log has grown to `LOG_BYTES`. Without
    # a limit the log keeps the size that it once had.
    pragmas = (
        f"busy_timeout={int(patience * 1000)}",
        "journal_mode=WAL",
        "synchronous=NORMAL",
        f"wal_autocheckpoint={LOG_BYTES // PAGE_BYTES}",
        f"journal_size_limit={LOG_BYTES}",
        "secure_delete=ON",  # what is erased is overwritten with zeros
    )
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")


def _is_busy(error: BaseException | None) -> bool:
    """Return True if the only fault is that another connection has the lock."""
    return _has_code(error, sqlite3.SQLITE_BUSY)


def _has_code(error: BaseException | None, code: int) -> bool:
    cause = getattr(error, "orig", None) or error
    return isinstance(cause, sqlite3.OperationalError) and cause.sqlite_errorcode & 0xFF == code


def _checkpoint(engine: Engine, mode: Literal["PASSIVE", "TRUNCATE"] = "PASSIVE") -> bool:
    """Copy the log into the database file, as far as readers allow. If that fails, the next one will do it.

    Returns True if all of it was copied; with `TRUNCATE` the log is empty then.
    """
    with suppress(SQLAlchemyError, sqlite3.Error), engine.connect() as conn:
        busy, in_log, copied = conn.connection.cursor().execute(f"PRAGMA wal_checkpoint({mode})").fetchone()
        return not busy and in_log == copied
    return False


def _rewrite(engine: Engine) -> bool:
    """Write the whole file anew, which takes less than a second. Returns False if it is too large for that, or fails.

    `secure_delete` overwrites a row that is deleted, and not the copies of it that SQLite leaves in the unused part of
    a page when it splits or joins pages: one for some hundred rows.
    """
    path = Path(engine.url.database or "")
    with suppress(SQLAlchemyError, sqlite3.Error, OSError):
        if path.stat().st_size > REWRITTEN_BYTES:
            return False
        with engine.connect() as conn:
            conn.connection.cursor().execute("VACUUM")
        return True
    return False


def _begin_immediate(conn: Connection) -> None:
    raw: sqlite3.Connection = conn.connection.driver_connection  # type: ignore[assignment]
    if not raw.in_transaction:
        raw.execute("BEGIN IMMEDIATE")
