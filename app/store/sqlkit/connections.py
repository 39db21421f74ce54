"""Connections to a Postgres: a pool of them, some of which stay at hand for statements that stand alone.

SQLAlchemy's pool opens them, counts them and replaces what is dead. But a statement that goes through it costs our
processor some 220 microseconds, 65 of them in the driver: a connection is checked out and in, a greenlet made, a cursor
filled. Most of what is asked for is one statement. So that is sent on the driver's own connection, which stays checked
out afterwards until somebody else waits for one.
"""

import asyncio
import select
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from sqlalchemy import event
from sqlalchemy.exc import DisconnectionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine
from sqlalchemy.pool import ConnectionPoolEntry, QueuePool

STATEMENTS = 256
"""Most statements that a connection keeps prepared."""


@dataclass(slots=True)
class RawConnection:
    """One connection of the driver's, and what was prepared on it. It is used by one at a time."""

    raw: asyncpg.Connection
    losses: int
    """How many losses there had been when it was opened."""
    _prepared: dict[str, Any] = field(default_factory=dict)
    _unread: select.poll = field(default_factory=select.poll)

    def __post_init__(self) -> None:
        # The driver shows its socket to nobody; its version is pinned, and a test closes it.
        self._unread.register(self.raw._transport.get_extra_info("socket").fileno(), select.POLLIN)

    @property
    def lives(self) -> bool:
        """Whether the server still has its end, as far as this machine was told. The loop may not have come to that
        yet, and a statement that goes out now would be in doubt, while the server never got it.

        What is unread while nobody asks anything is its end or its last words, or too rare to look at.
        """
        return not (self.raw.is_closed() or self._unread.poll(0))

    async def fetch(self, text: str, values: Sequence[object], limit: float) -> Sequence[Any]:
        """The rows of a statement, and its COMMIT; `TimeoutError` when the loop's clock passes `limit`."""
        time = asyncio.get_running_loop().time
        statement = self._prepared.get(text)
        if statement is None:
            statement = await self._prepare(text, limit - time())
        try:
            return await statement.fetch(*values, timeout=limit - time())  # type: ignore[no-any-return]
        except (asyncpg.InvalidCachedStatementError, asyncpg.OutdatedSchemaCacheError):  # a table was altered
            self._prepared.clear()
            raise

    async def _prepare(self, text: str, seconds: float) -> Any:
        while len(self._prepared) >= STATEMENTS:
            del self._prepared[next(iter(self._prepared))]
        self._prepared[text] = statement = await self.raw.prepare(text, timeout=seconds)
        return statement


@dataclass(slots=True)
class Checkout:
    """A wire, and the connection of SQLAlchemy's that keeps its place in the pool."""

    connection: RawConnection
    place: AsyncConnection
    leave: Callable[[], Awaitable[None]]
    """Gives the place back, even where it is told to stop meanwhile."""


class Connections:
    """The connections of one engine, which is set to commit by itself."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._kept: list[Checkout] = []
        self._waiting = 0
        self._closed = False
        self._losses = 0
        event.listen(engine.sync_engine, "connect", self._opened)
        event.listen(engine.sync_engine, "checkout", self._checked_out)

    def lost(self) -> None:
        """One was found broken: then the others are dead, too, or will not take writes any more."""
        self._losses += 1

    @property
    def losses(self) -> int:
        """The number of losses so far, after a look at the connections at hand."""
        current = [kept.connection for kept in self._kept if kept.connection.losses == self._losses]
        if not all(connection.lives for connection in current):
            self.lost()
        return self._losses

    async def take(self, limit: float) -> Checkout:
        """One for a statement that stands alone; `TimeoutError` when the loop's clock passes `limit`."""
        if self._kept:
            checkout = self._kept.pop()
            if checkout.connection.losses == self._losses and checkout.connection.lives:
                return checkout
            async with asyncio.timeout_at(limit):
                await self._end(checkout)
        stack = AsyncExitStack()
        with self._one_waits():
            async with asyncio.timeout_at(limit):
                place = await stack.enter_async_context(self._engine.connect())
        connection = place.sync_connection
        assert connection is not None
        return Checkout(connection.info["baton"], place, stack.aclose)

    async def give(self, checkout: Checkout) -> None:
        """Give back one whose statement has been answered."""
        if not (self._waiting or self._closed):
            self._kept.append(checkout)
            return
        with suppress(Exception):  # what becomes of the connection says nothing of the statement
            await checkout.leave()

    async def drop(self, checkout: Checkout, error: BaseException) -> None:
        """Give back one that brought an error. Nobody uses it again if it was broken off: the answer that is under way
        would be checkout for the next one's."""
        with suppress(Exception):  # see `give`
            await (checkout.leave() if isinstance(error, asyncpg.PostgresError) else self._end(checkout))

    @asynccontextmanager
    async def connect(self, engine: AsyncEngine) -> AsyncIterator[AsyncConnection]:
        """One for anything else: `engine` is ours, or ours with other options."""
        async with AsyncExitStack() as stack:
            with self._one_waits():
                if self._kept and self._pool_is_empty():
                    await self._kept.pop(0).leave()
                place = await stack.enter_async_context(engine.connect())
            yield place

    async def close(self) -> None:
        """Let go of all of them."""
        self._closed = True
        while self._kept:
            await self._kept.pop().leave()
        await self._engine.dispose()

    def _opened(self, connection: Any, record: ConnectionPoolEntry) -> None:
        record.info["baton"] = RawConnection(connection.driver_connection, self._losses)

    def _checked_out(self, _connection: object, record: ConnectionPoolEntry, _proxy: object) -> None:
        """A connection from before a loss is replaced when it is checkout next. To dispose of the pool would be another
        way, but what was in use then, or waited for, would keep its place in the server until the collector came."""
        if record.info["baton"].losses != self._losses:
            raise DisconnectionError

    @contextmanager
    def _one_waits(self) -> Iterator[None]:
        self._waiting += 1
        try:
            yield
        finally:
            self._waiting -= 1

    def _pool_is_empty(self) -> bool:
        pool = self._engine.pool
        return isinstance(pool, QueuePool) and pool.checkedout() >= pool.size()

    async def _end(self, checkout: Checkout) -> None:
        try:
            await checkout.place.invalidate()
        finally:
            await checkout.leave()
