"""The database of a world: the product's own store code over one SQLite in memory, and everything that can happen on
the way to a database and back.

`SqlStore`, its group commit and its look-up after an unanswered COMMIT are the product's; what is simulated is the
`Runner` beneath them, that is: the network and the server.
"""

import asyncio
import sqlite3
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar, cast

from sqlalchemy import Connection, create_engine, event
from sqlalchemy.exc import SQLAlchemyError
from sqlalchemy.pool import StaticPool

from app.store.rows.runs import clock
from app.store.sql import SqlStore
from app.store.sqlkit.runner import Fault, Runner, reason_of
from app.store.sqlkit.statements import Statements
from app.store.sqlkit.tables import METADATA
from app.store.writing.batch import RowCache
from app.telemetry import PoolUse
from tests.simulation.loop import EPOCH
from tests.simulation.seam import Seam
from tests.simulation.witness import TRIGGERS, Witness

T = TypeVar("T")
GIVE_UP = 5.0
"""Seconds after which a statement that does not end is given up."""


@cache
def connection() -> Connection:
    """Return one database for all worlds of this Python process; each begins by emptying it."""
    engine = create_engine("sqlite://", poolclass=StaticPool, hide_parameters=True)
    event.listen(engine, "connect", _no_transactions)
    event.listen(engine, "begin", _begin)
    conn = engine.connect()
    METADATA.create_all(conn)
    conn.commit()
    conn.connection.cursor().executescript(TRIGGERS)
    return conn


@cache
def statements(_dialect: str) -> Statements:
    """Compiled once: to compile them anew for every process of every world would take half of the time."""
    return Statements(connection().engine.dialect)


def _no_transactions(raw: sqlite3.Connection, _record: object) -> None:
    raw.isolation_level = None


def _begin(conn: Connection) -> None:
    conn.connection.cursor().execute("BEGIN")


class Database:
    """The server. While `down_until` lies ahead nobody reaches it."""

    def __init__(self) -> None:
        self.conn = connection()
        self.down_until = 0.0
        cursor = self.conn.connection.cursor()
        for table in (*METADATA.tables, "witness", "buried"):  # the last two, because deleting is witnessed too
            cursor.execute(f"DELETE FROM {table}")
        # The form that a migration writes: since when changes of keys and budgets are logged.
        cursor.execute("INSERT INTO forms (name, since) VALUES ('admin_events', 0)")

    def rows(self, query: str, *values: object) -> list[tuple[Any, ...]]:
        """Return what the oracle reads, past all product code."""
        cursor = self.conn.connection.cursor()
        cursor.execute(query, values)
        return cursor.fetchall()


class SimStore(SqlStore):
    """The store as one process has it; `giving` learns which runs it means to give up."""

    def __init__(self, runner: Runner, lease: float, time: Callable[[], float], giving: set[tuple[str, str]]) -> None:
        super().__init__(runner, lease, 5.0, row_cache=RowCache())
        self._time, self._giving = time, giving

    async def renew_leases(self, driver: str, epochs: Mapping[str, int], until: float) -> Mapping[str, int]:
        """Renew these leases."""
        if until <= EPOCH + self._time():
            self._giving |= {(driver, run) for run in epochs}
        return await super().renew_leases(driver, epochs, until)


class SimRunner:
    """A `Runner` of one process: the way to the server and back, and its faults."""

    def __init__(self, database: Database, witness: Witness, seam: Seam) -> None:
        self._database = database
        self._witness = witness
        self._seam = seam
        self.dialect = database.conn.engine.dialect
        self.losses = 0
        self.server_changes = 0
        self.pool_use = PoolUse(0, 1, 0, 0)

    isolates_tenants = False

    async def read(self, work: Callable[[Connection], T], *, brief: bool = False, tenant: str | None = None) -> T:
        """Run work that writes nothing."""
        await self._arrive("store.read")
        result = self._run(work) if work is not clock else cast(T, EPOCH + self._seam.time())
        await self._seam.lag(0.001)
        return result

    async def write(
        self, work: Callable[[Connection], T], *, expected_result: object = None, tenant: str | None = None
    ) -> T:
        """Run work in one transaction and commit it, or not; and answer, or not."""
        seam = self._seam
        await self._arrive("store.write")
        if seam.hit("store.write.timeout"):
            await asyncio.sleep(GIVE_UP)
            raise Fault("down")
        if seam.hit("store.write.contended"):
            raise Fault("contended")
        if seam.hit("store.write.refused"):
            raise Fault("refused")
        if seam.hit("store.commit.unanswered_not_written"):
            raise Fault("undecided", self._run(work, keep=False) if expected_result is None else expected_result)
        result = self._run(work)
        self._witness.committed(seam.name, self._database.rows)
        await seam.strike("store.committed")
        await seam.lag(0.001)
        if seam.hit("store.answer.slow"):
            await asyncio.sleep(3.0 * seam.chance())
        if seam.hit("store.commit.unanswered_written"):
            raise Fault("undecided", result if expected_result is None else expected_result)
        return result

    async def empty_log(self) -> bool:
        """The database is in memory, and has no log of its own."""
        return True

    async def close(self) -> None:
        """Nothing to let go of."""

    async def _arrive(self, verb: str) -> None:
        """To the server, which may be away."""
        seam = self._seam
        await seam.strike(verb)
        await seam.lag(0.001)
        if seam.hit(f"{verb}.slow"):
            await asyncio.sleep(3.0 * seam.chance())
        if self._database.down_until > seam.time():
            await asyncio.sleep(2.0 * seam.chance())
            raise Fault("down")
        if seam.hit(f"{verb}.down"):
            raise Fault("down")
        if seam.hit(f"{verb}.lost"):
            raise Fault("lost")

    def _run(self, work: Callable[[Connection], T], *, keep: bool = True) -> T:
        try:
            transaction = self._database.conn.begin()
            try:
                result = work(self._database.conn)
            except BaseException:
                transaction.rollback()
                raise
            if keep:
                transaction.commit()
            else:
                transaction.rollback()
            return result
        except (SQLAlchemyError, sqlite3.Error) as error:
            self._witness.object(f"the database refused a statement: {type(error).__name__}")
            raise Fault(reason_of(error, self.dialect)) from error
