"""Runs plain functions over a SQLAlchemy connection, and single statements, on Postgres through asyncpg.

SQLAlchemy's pool opens connections, counts them and replaces dead ones. A statement that goes through it costs this
process some 220 microseconds of CPU, 65 of them in the driver: a connection is checked out and in, a greenlet is made,
a cursor filled. Most transactions of the journal are one statement. Such a statement is sent on the driver's own
connection, which stays checked out afterwards until something else waits for a connection. While it is, it plans by
key (see `statements.BY_KEY`); in the pool it has the server's own settings.

Two ways of pooling by PgBouncer are supported, apart from a direct connection:

* Session pooling needs nothing. Settings are made after connecting, since PgBouncer refuses most start-up parameters.
* Transaction pooling is asked for by `?pgbouncer=transaction` in the URL. Consecutive transactions may then be on
  different connections to the server, so nothing is prepared or set for longer than a transaction: statements are
  sent unnamed, in one exchange that PgBouncer does not split, and time limits are the server's
  (deploy/docs/postgres.md).
"""

import asyncio
import logging
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from math import inf
from typing import Any, Concatenate, Literal, ParamSpec, TypeVar

import asyncpg
from sqlalchemy import Connection, Transaction, event, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DisconnectionError, InvalidRequestError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import ConnectionPoolEntry, NullPool, QueuePool

from app.store.sqlkit import generation, row_security
from app.store.sqlkit.runner import LOCK_SECONDS, POOLING, Fault, reason_of, sqlstate
from app.store.sqlkit.statements import BY_KEY, SingleStatement
from app.telemetry import PoolUse

logger = logging.getLogger(__name__)

T = TypeVar("T")
P = ParamSpec("P")

CONNECT_SECONDS = 2.0
WORK_SECONDS = 5.0
"""Longest time for one piece of work, its transaction included."""
NEVER_COMMITTED = ("23", "40")
"""SQLSTATE classes with which a COMMIT is known to have failed: constraint violations, and rollbacks by the server."""
TOO_MANY = "53300"
"""SQLSTATE of a server that has no connection left. It may still count those that have just been closed."""
BUSY = "cannot switch to state"
"""Part of asyncpg's message for a connection that is being closed. Nothing was sent on it then."""
STATEMENTS = 256
"""Most statements that a connection keeps prepared."""
SET_BY_KEY = "; ".join([f"SET {name} = {value}" for name, value in BY_KEY.items()])
RESET_BY_KEY = "; ".join([f"RESET {name}" for name in BY_KEY])
SETTINGS_SECONDS = 2.0
"""Seconds to wait for the settings of a new connection."""
READER_SECONDS = 300.0
"""Time after which the role of reads for callers is looked for again if there was none."""
POOLING_ROUNDS = 3
"""Times that two connections are compared, to find out whether a PgBouncer pools transactions."""
UNNAMED = ""
"""Name of the prepared statement that lasts until the next one is prepared."""


def postgres_engine(url: URL, *, connect_args: Mapping[str, Any], **options: Any) -> AsyncEngine:
    """Return an engine for a Postgres, direct or behind PgBouncer. It connects when first used."""
    arguments = dict(connect_args)
    if pools_transactions(url):
        arguments |= {
            "statement_cache_size": 0,
            "prepared_statement_cache_size": 0,
            "prepared_statement_name_func": _name_statement,
        }
    return create_async_engine(url.difference_update_query([POOLING]), connect_args=arguments, **options)


def pools_transactions(url: URL) -> bool:
    """Return True if consecutive transactions of a connection may reach different connections of the server."""
    return url.query.get(POOLING) == "transaction"


async def share_server_connections(url: URL, *, connect_args: Mapping[str, Any]) -> bool:
    """Return True if two open connections of a URL were seen to use the same connection to the server, or one of them
    two in turn: then a PgBouncer between them pools transactions, whatever the URL says.

    A PgBouncer with much other work may not show it in any round.
    """
    declared = url.update_query_dict({POOLING: "transaction"})  # works however it is pooled
    engine = postgres_engine(declared, connect_args=connect_args, poolclass=NullPool)
    try:
        async with engine.connect() as first, engine.connect() as second:
            for _ in range(POOLING_ROUNDS):
                before = await _server_process(first)
                await first.rollback()
                if await _server_process(second) == before:
                    return True
                after = await _server_process(first)  # while the second one is in a transaction
                await first.rollback()
                await second.rollback()
                if after != before:
                    return True
    finally:
        await engine.dispose()
    return False


async def _server_process(connection: AsyncConnection) -> int:
    """Return the id of the server's process behind a connection, which begins a transaction."""
    number: int = (await connection.execute(text("SELECT pg_backend_pid()"))).scalar_one()
    return number


def _name_statement() -> str:
    return UNNAMED


@dataclass(slots=True)
class RawConnection:
    """One connection of the driver's, and the statements that were prepared on it. It has one user at a time."""

    raw: asyncpg.Connection
    losses: int
    """Number of losses before it was opened (see `Connections.note_loss`)."""
    keeps_statements: bool = True
    """False behind a PgBouncer that pools transactions."""
    _prepared: dict[str, Any] = field(default_factory=dict)
    _unread: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        # The driver does not publish its socket; its version is pinned, and a test closes it.
        self._unread.register(self.raw._transport.get_extra_info("socket").fileno(), select.POLLIN)

    @property
    def is_alive(self) -> bool:
        """Return False if this machine knows that the server has closed the connection.

        The event loop may not have read that yet: a statement sent now would be undecided, though the server never
        received it. What is unread on an idle connection is its end, or the server's last words before it.
        """
        return not (self.raw.is_closed() or self._unread.poll(0))

    async def prepare(self, text: str, seconds: float) -> Any:
        """Return the driver's prepared statement. Raises `TimeoutError` if it takes longer to prepare it."""
        earlier = self._prepared.get(text)
        if earlier is not None:
            return earlier
        if not self.keeps_statements:
            return await self.raw.prepare(text, name=UNNAMED, timeout=seconds)
        while len(self._prepared) >= STATEMENTS:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[text] = statement = await self.raw.prepare(text, timeout=seconds)
        return statement

    def forget_statements(self) -> None:
        """Prepare all statements anew."""
        self._prepared.clear()


@dataclass(slots=True)
class Checkout:
    """A connection that is checked out of SQLAlchemy's pool."""

    connection: RawConnection
    pooled: AsyncConnection
    """SQLAlchemy's connection, which stands for it in the pool."""
    return_to_pool: Callable[[], Awaitable[None]]
    """Check it in, even if the task is cancelled meanwhile."""


class NoConnection(TimeoutError):
    """No connection could be had: none opened within `CONNECT_SECONDS`, or those that did were outdated by losses."""


class Connections:
    """The connections of one engine, which must be in autocommit mode."""

    def __init__(self, engine: AsyncEngine, settings: Mapping[str, str], *, keeps_statements: bool) -> None:
        """`settings` are made on each new connection, unless a statement may reach another one than the one before."""
        self._engine = engine
        self._settings = settings
        self._keeps_statements = keeps_statements
        self._idle: list[Checkout] = []
        self._waiting = 0
        self._waits = 0
        self._closed = False
        self._losses = 0
        self._last_answer_at = -inf
        self._server: str | None = None
        self.server_changes = 0
        """The number of times that another server was found than the one before."""
        event.listen(engine.sync_engine, "connect", self._on_connect)
        event.listen(engine.sync_engine, "checkout", self._on_checkout)

    def note_loss(self) -> None:
        """Note that a connection was found broken. The others are then taken to be broken, or read-only, as well."""
        self._losses += 1

    @property
    def losses(self) -> int:
        """Return the number of losses so far, after a look at the connections at hand."""
        current = [checkout.connection for checkout in self._idle if checkout.connection.losses == self._losses]
        if not all(connection.is_alive for connection in current):
            self.note_loss()
        return self._losses

    def has_answered_within(self, seconds: float) -> bool:
        """Return True if the server has answered on some connection within that time."""
        return asyncio.get_running_loop().time() - self._last_answer_at <= seconds

    @property
    def use(self) -> PoolUse:
        """Return the use of the connections; those at hand are checked out of SQLAlchemy's pool, and free."""
        pool = self._engine.pool
        assert isinstance(pool, QueuePool)
        return PoolUse(pool.checkedout() - len(self._idle), pool.size(), self._waiting, self._waits)

    async def take(self, limit: float) -> Checkout:
        """Return a connection for a single statement. Raises `TimeoutError` when the loop's clock passes `limit`."""
        if self._idle:
            idle = self._idle.pop()
            if idle.connection.losses == self._losses and idle.connection.is_alive:
                return idle
            async with asyncio.timeout_at(limit):
                await self.discard(idle)
        stack = AsyncExitStack()
        with self._count_waiting():
            async with asyncio.timeout_at(limit):
                place = await self._open(stack, self._engine)
        connection = place.sync_connection
        assert connection is not None
        checkout = Checkout(connection.info["baton"], place, stack.aclose)
        if self._keeps_statements:
            await self._set_up(checkout, limit)
        return checkout

    async def give(self, checkout: Checkout) -> None:
        """Return a connection whose statement was answered."""
        self._last_answer_at = asyncio.get_running_loop().time()
        if not (self._waiting or self._closed):
            self._idle.append(checkout)
            return
        with suppress(Exception):  # a fault of the connection says nothing of the statement
            await self._check_in(checkout)

    async def drop(self, checkout: Checkout, error: BaseException) -> None:
        """Return a connection whose statement raised this error.

        It is closed unless the error is the server's answer: a later user would take a late answer for its own.
        """
        if isinstance(error, asyncpg.InvalidCachedStatementError | asyncpg.OutdatedSchemaCacheError):
            checkout.connection.forget_statements()  # a table was altered
        with suppress(Exception):  # see `give`
            if isinstance(error, asyncpg.PostgresError):
                await self._check_in(checkout)
            else:
                await self.discard(checkout)

    @asynccontextmanager
    async def connect(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        """Return a connection for anything else. `engine` is this one, or this one with other options."""
        async with AsyncExitStack() as stack:
            with self._count_waiting():
                if self._idle and self._pool_is_empty():
                    with suppress(Exception):  # it is closed then, which makes room as well
                        await self._check_in(self._idle.pop(0))
                place = await self._open(stack, engine)
            yield place
            self._last_answer_at = asyncio.get_running_loop().time()

    async def _open(self, stack: AsyncExitStack, engine: AsyncEngine) -> AsyncConnection:
        """Return a connection of the pool, which may have to be opened; it goes back with the `stack`."""
        try:
            return await stack.enter_async_context(engine.connect())
        except (TimeoutError, InvalidRequestError) as error:  # the latter after two that a loss has outdated
            raise NoConnection from error

    async def close(self) -> None:
        """Close all connections."""
        self._closed = True
        while self._idle:
            await self._idle.pop().return_to_pool()
        await self._engine.dispose()

    def _on_connect(self, connection: Any, record: ConnectionPoolEntry) -> None:
        record.info["baton"] = RawConnection(connection.driver_connection, self._losses, self._keeps_statements)
        if self._keeps_statements and self._settings:
            statement = "; ".join([f"SET {name} = '{value}'" for name, value in self._settings.items()])
            connection.run_async(lambda driver: driver.execute(statement, timeout=SETTINGS_SECONDS))
        self._note_server(connection.run_async(generation.look))

    def _note_server(self, server: str | None) -> None:
        """Note the server that a new connection has reached. After a failover it may be an older copy of the one
        before, so that nothing that this process knows of its contents holds."""
        if server is None or server == self._server:
            return
        if self._server is not None:
            self.server_changes += 1
            logger.warning("The database has moved to another server; runs are read again and taken over.")
        self._server = server

    def _on_checkout(self, _connection: object, record: ConnectionPoolEntry, _proxy: object) -> None:
        """Have a connection from before a loss replaced.

        To dispose of the whole pool instead would leave connections that were in use, or waited for, open in the server
        until they are collected as garbage.
        """
        if record.info["baton"].losses != self._losses:
            raise DisconnectionError

    @contextmanager
    def _count_waiting(self) -> Iterator[None]:
        self._waits += self._pool_is_empty() and not self._idle
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _pool_is_empty(self) -> bool:
        pool = self._engine.pool
        return isinstance(pool, QueuePool) and pool.checkedout() >= pool.size()

    async def _set_up(self, checkout: Checkout, limit: float) -> None:
        """Have the connection plan by key while it is used for single statements."""
        try:
            async with asyncio.timeout_at(limit):
                await checkout.connection.raw.execute(SET_BY_KEY)
        except BaseException:
            await self.discard(checkout)
            raise

    async def _check_in(self, checkout: Checkout) -> None:
        """Return a connection to the pool, for statements of any kind."""
        if not self._keeps_statements:
            await checkout.return_to_pool()
            return
        try:
            await checkout.connection.raw.execute(RESET_BY_KEY, timeout=SETTINGS_SECONDS)
        except BaseException:
            await self.discard(checkout)
            raise
        await checkout.return_to_pool()

    async def discard(self, checkout: Checkout) -> None:
        """Close a connection."""
        try:
            await checkout.pooled.invalidate()
        finally:
            await checkout.return_to_pool()


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
        self._reader_role: str | None = None
        self._looks_for_reader_at = 0.0
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

    @property
    def server_changes(self) -> int:
        return self._connections.server_changes

    @property
    def pool_use(self) -> PoolUse:
        return self._connections.use

    @property
    def isolates_tenants(self) -> bool:
        return True

    def read(
        self, work: Callable[[Connection], T], *, brief: bool = False, tenant: str | None = None
    ) -> Coroutine[Any, Any, T]:
        if tenant is not None:
            return self._read_for(tenant, work)
        if isinstance(work, SingleStatement):
            return self._send(work)
        return self._read(work)

    def write(
        self, work: Callable[[Connection], T], *, expected_result: object = None, tenant: str | None = None
    ) -> Coroutine[Any, Any, T]:
        if tenant is not None:
            return self._write_for(tenant, work)
        if isinstance(work, SingleStatement):
            return self._send(work, expected_result)
        return self._transact(work)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        try:
            async with asyncio.timeout(self._seconds), self._connections.connect(self._reading) as conn:
                return await conn.run_sync(partial(_run_or_invalidate, work))
        except self._faults as error:
            raise self._fault(error) from error

    async def _read_for(self, tenant: str, work: Callable[[Connection], T]) -> T:
        """Read for a caller of a tenant, under row-level security if it is in force."""
        reader = await self._reader()
        if reader is None:
            return await self.read(work)
        if isinstance(work, SingleStatement):
            return await self._send_in(row_security.begin(reader, tenant), work)
        return await self._transact(partial(row_security.read_as, work=work, reader=reader, tenant=tenant))

    async def _write_for(self, tenant: str, work: Callable[[Connection], T]) -> T:
        """Write for a caller of a tenant, under row-level security if it is in force."""
        reader = await self._reader()
        if reader is None:
            return await self._transact(work)
        return await self._transact(partial(row_security.write_as, work=work, reader=reader, tenant=tenant))

    async def _send_in(self, begin: str, statement: SingleStatement[T]) -> T:
        """Carry out a statement that reads in a transaction of its own, which the text `begin` opens.

        It is prepared apart from the same statement of the service's own reads: its plan depends on the role.
        """
        time = asyncio.get_running_loop().time
        limit = time() + self._seconds
        try:
            checkout = await self._connections.take(limit)
        except self._faults as error:
            raise self._fault(error) from error
        raw = checkout.connection.raw
        try:
            await raw.execute(begin, timeout=limit - time())
            text = f"{statement.statement.text} {row_security.MARK}"
            prepared = await checkout.connection.prepare(text, limit - time())
            rows = await prepared.fetch(*statement.values, timeout=limit - time())
            await raw.execute("COMMIT", timeout=limit - time())
        except BaseException as error:
            with suppress(Exception):
                await self._connections.discard(checkout)  # its transaction may be open
            if isinstance(error, self._faults):
                raise self._fault(error) from error
            raise
        await self._connections.give(checkout)
        return statement.to_result(rows)

    async def _reader(self) -> str | None:
        """Return the role of reads for callers. That there is none is looked up again after some time."""
        time = asyncio.get_running_loop().time
        if self._reader_role is None and time() >= self._looks_for_reader_at:
            self._reader_role = await self._read(row_security.reader_of)
            self._looks_for_reader_at = time() + READER_SECONDS
            if self._reader_role is None:
                logger.warning(
                    "Row-level security is not in force: requests of callers rely on the gateways' checks alone; "
                    "`baton doctor` says what is missing."
                )
        return self._reader_role

    async def _transact(self, work: Callable[[Connection], T]) -> T:
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

    async def empty_log(self) -> bool:
        return False

    async def overwrite_erased(self) -> bool:
        return False

    async def close(self) -> None:
        await self._connections.close()

    async def _send(self, statement: SingleStatement[T], expected_result: object = None) -> T:
        """Carry out a statement that is its own transaction.

        `expected_result` is what it returns, which the fault carries if the server's answer is missing.
        """
        time = asyncio.get_running_loop().time
        limit = time() + self._seconds
        try:
            checkout = await self._connections.take(limit)
        except self._faults as error:
            raise self._fault(error) from error
        try:
            prepared = await checkout.connection.prepare(statement.statement.text, limit - time())
            rows = await prepared.fetch(*statement.values, timeout=limit - time())
        except BaseException as error:
            await self._connections.drop(checkout, error)
            if isinstance(error, self._faults):
                unanswered = expected_result
                if self._had_no_effect(error):
                    unanswered = None
                raise self._fault(error, unanswered) from error
            raise
        await self._connections.give(checkout)
        return statement.to_result(rows)

    def _had_no_effect(self, error: Exception) -> bool:
        """Return True if a single statement is known not to have been carried out.

        The server said so; or it never received it, because the connection was closed or a value could not be encoded.
        """
        causes = (error, error.__cause__, getattr(error, "orig", None))
        unsent = any(isinstance(cause, asyncpg.InterfaceError) or BUSY in str(cause) for cause in causes)
        return unsent or (bool(sqlstate(error)) and reason_of(error, self.dialect) != "lost")

    def _fault(self, error: Exception, unanswered: object = None) -> Fault:
        reason = reason_of(error, self.dialect)
        not_opened = isinstance(error, NoConnection) or sqlstate(error) == TOO_MANY
        answers_others = self._connections.has_answered_within(CONNECT_SECONDS)
        if not_opened and answers_others:
            reason = "slow"
        elif isinstance(error, TimeoutError) and answers_others:
            reason = "overlong"
        if reason == "lost":
            self._connections.note_loss()
        if unanswered is not None and not sqlstate(error).startswith(NEVER_COMMITTED):
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
            _run_or_invalidate(self._work, conn, transaction)

    def _work(self, conn: Connection, transaction: Transaction) -> None:
        self.result = self.work(conn)
        self.phase = "commit"
        transaction.commit()
        self.phase = "done"


def _run_or_invalidate(
    work: Callable[Concatenate[Connection, P], T], conn: Connection, *args: P.args, **kwargs: P.kwargs
) -> T:
    """Run work on a connection, and close the connection if the work is cancelled.

    A BEGIN that was cancelled may still be on its way. The next user's transaction would then be a savepoint inside of
    it, and its COMMIT a release: reported as written, and never committed. SQLAlchemy takes care of that for its own
    statements, but ours run on the driver's cursor.
    """
    try:
        return work(conn, *args, **kwargs)
    except asyncio.CancelledError:
        conn.invalidate()
        raise
