"""One hearer of one address: a subscribed connection that comes back by itself, and the loop that reads it."""

import logging
from collections.abc import Callable
from typing import Any, Final, Protocol

from redis.exceptions import ConnectionError as RedisConnectionError

from app.network import retries
from app.stepqueue.codec import Forged, Undecodable, unpack_live, unsealed
from app.stepqueue.connection_errors import FAULTS
from app.stepqueue.protocol import Live

log = logging.getLogger(__name__)

PROBE_SECONDS: Final = 1.0
"""After this much silence we ask whether the server is there; after as much again we connect anew."""


class Losses(Protocol):
    """The counters of the messages that a subscriber had to drop."""

    undecodable: int
    forged: int
    sink_failures: int


class Subscriber:
    """`open`, then `listen` in a task, then `close`. Neither bad payloads nor a sink that raises end the listening."""

    def __init__(self, pool: Any, channel: str, sink: Callable[[Live], None], losses: Losses, key: bytes) -> None:
        """`pool` is redis-py's, untyped as its methods are; messages that are not sealed with `key` are dropped."""
        self._pool = pool
        self._channel = channel
        self._sink = sink
        self._losses = losses
        self._key = key
        self._connection: Any = None
        self._subscribed = False
        self._stopping = False

    @property
    def hears(self) -> bool:
        """Return whether it is subscribed, as of the last reply or error."""
        return self._subscribed

    async def open(self) -> None:
        """Subscribe; returns when the server has confirmed it. Raises redis-py's errors."""
        self._connection = await self._pool.get_connection()
        try:
            await self._connection.send_command("SUBSCRIBE", self._channel, check_health=False)
            await self._connection.read_response()
            self._subscribed = True
        except BaseException:
            await self.close()
            raise

    async def listen(self) -> None:
        """Call the sink for every message until stopped. A cancellation alone may get lost in the client."""
        await retries.redis_subscription(faults=FAULTS, stopped=lambda: self._stopping)(self._listen_once)

    async def _listen_once(self) -> None:
        """Subscribe and read until stopped; raises what interrupts it, after the connection is closed."""
        try:
            if self._connection is None:
                await self.open()
            await self._read()
        except FAULTS as fault:
            log.debug("the subscription was interrupted by %s", type(fault).__name__)
            await self.close()
            raise

    def stop(self) -> None:
        """Let `listen` return, within two time-outs."""
        self._stopping = True

    async def close(self) -> None:
        """Let go of the connection. It is never given to anybody else: it may still be subscribed."""
        connection, self._connection, self._subscribed = self._connection, None, False
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _read(self) -> None:
        """Read until the connection fails. A half-open one is silent for ever, hence the probe."""
        probing = False
        while not self._stopping:
            reply = await self._connection.read_response(timeout=PROBE_SECONDS)
            if reply is not None:
                probing = False
                if reply[0] == b"message":
                    self._deliver(reply[2])
            elif probing:
                raise RedisConnectionError("the server is silent")
            else:
                await self._connection.send_command("PING", check_health=False)
                probing = True

    def _deliver(self, payload: bytes) -> None:
        try:
            for message in unpack_live(unsealed(payload, self._channel, self._key)):
                self._hand_over(message)
        except Forged:
            self._losses.forged += 1
        except Undecodable:
            self._losses.undecodable += 1

    def _hand_over(self, message: Live) -> None:
        try:
            self._sink(message)
        except Exception as fault:
            self._losses.sink_failures += 1
            # Only the kind of fault: its text may hold what a worker said.
            log.warning("a sink of the step queue raised %s", type(fault).__name__)
