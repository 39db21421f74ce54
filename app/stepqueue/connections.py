"""Connections to Redis for the commands of every step: one write and one read for each exchange, and nothing else.

redis-py's own client spends 100 to 150 microseconds of CPU on a command, most of it on retries, metrics and time limits
which the callers here have already; its connection and hiredis' parser, taken by themselves, need a third of that.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Final

import hiredis
from redis.exceptions import RedisError, ResponseError

FAULTS: Final = (RedisError, OSError, TimeoutError, RuntimeError)
"""The exceptions that mean that the server or the network between has failed.

RuntimeError is what uvloop says of a transport that was closed under its writer ("the handler is closed"); redis-py
lets it pass, and unless it is caught here it ends the process that merely wanted to say something."""
Words = tuple[str | int | bytes, ...]
"""A command as it is sent."""
PACK: Final[Callable[[Words], bytes]] = hiredis.pack_command  # type: ignore[assignment]  # the stub means one word
CONNECTIONS: Final = 32
"""At most so many exchanges at a time; one beyond them waits its turn within its caller's time."""


class Lines:
    """A bounded number of connections, each used by one exchange at a time.

    Sets no time limit of its own but for connecting: the caller's ends an exchange, and its connection with it.
    """

    def __init__(self, pool: Any) -> None:
        """`pool` is redis-py's, untyped as its methods are, and makes connections; it retains none of these. Its
        connections must have no time limit for answers."""
        self._pool = pool
        self._room = asyncio.Semaphore(CONNECTIONS)
        self._free: list[Any] = []

    async def ask(self, *commands: Words) -> list[Any]:
        """Return the replies in order, in one round trip; that to a refused command is its `ResponseError`.

        Raises redis-py's errors where the connection fails. A connection that was used before and fails is replaced by
        a new one, once, so that a restart between two exchanges goes unnoticed; the commands may then have been carried
        out twice.
        """
        packed = b"".join(map(PACK, commands))
        async with self._room:
            if self._free:
                with suppress(*FAULTS):
                    return await self._exchange(self._free.pop(), packed, len(commands))
                await self.forget()
            return await self._exchange(self._pool.make_connection(), packed, len(commands))

    async def must(self, *commands: Words) -> list[Any]:
        """Return the replies as `ask` does, but raise the first `ResponseError`, also one inside a transaction."""
        replies = await self.ask(*commands)
        for reply in replies:
            for part in (reply, *reply) if isinstance(reply, list) else (reply,):
                if isinstance(part, Exception):
                    raise part
        return replies

    async def forget(self) -> None:
        """Close the connections that nobody uses: the server that they lead to may be gone, or not be the right one."""
        while self._free:
            await self._free.pop().disconnect(nowait=True)

    async def _exchange(self, connection: Any, packed: bytes, count: int) -> list[Any]:
        try:
            if not connection.is_connected:
                await connection.connect()
            await connection.send_packed_command(packed, check_health=False)
            replies = [await _reply(connection) for _ in range(count)]
        except BaseException:  # what is still to come would be taken for the answer to what is asked next
            await connection.disconnect(nowait=True)
            raise
        self._free.append(connection)
        return replies


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal
