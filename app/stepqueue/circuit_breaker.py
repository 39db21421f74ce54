"""The circuit breaker of Redis: probes detect an unavailable server, so that calls fail at once and not each by its
time limit.

    whole   calls go through
    full    the server is out of memory: it takes no new tickets, everything else goes through
    blown   the server does not answer: nothing is tried, and calls that wait for an answer are ended at once

A probe goes out every second, and every quarter of a second after a first failure, be it of a probe or of a call; its
outcome is the state. So the breaker closes by itself, and also a process that makes no calls knows the state.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, Final, ParamSpec, TypeVar

from redis.exceptions import OutOfMemoryError, ReadOnlyError, ResponseError

from app.errors import QueueUnavailable
from app.network import retries
from app.stepqueue.connection_errors import FAULTS

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

WATCH_SECONDS: Final = 1.0
PROBE_SECONDS: Final = 1.0
"""Seconds for one probe; a server that takes longer counts as unavailable."""
PULSE_SECONDS: Final = 10


class CircuitBreaker:
    """Guards the calls of one `RedisQueue`."""

    def __init__(self, client: Any, pulse: str, mended: Callable[[], Awaitable[None]]) -> None:
        """`client` is redis-py's, with a connection that no other call can take; `pulse` the key that a probe writes.

        `mended` is awaited when the server answers again after it did not.
        """
        self._client = client
        self._pulse = pulse
        self._mended = mended
        self._trouble = asyncio.Event()
        self._calls: set[asyncio.Timeout] = set()
        self._closed = False
        self.blown = False
        self.full = False

    def close(self) -> None:
        """Let `watch` return."""
        self._closed = True
        self._trouble.set()

    async def guard(self, seconds: float, call: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Make one call: refuses at once if blown, ends it after `seconds`, and raises `QueueUnavailable` only."""
        if self.blown:
            raise QueueUnavailable
        try:
            async with asyncio.timeout(seconds) as limit:
                self._calls.add(limit)
                try:
                    return await call(*args, **named)
                finally:
                    self._calls.discard(limit)
        except FAULTS as fault:
            self._note(fault)
            raise QueueUnavailable from fault

    async def watch(self) -> None:
        """Probe until closed. A cancellation alone is not relied upon: the client may lose it to a time-out."""
        while not self._closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._trouble.wait()
            if self.blown:
                await asyncio.sleep(retries.REDIS_PAUSE)
            await retries.redis_probe(stopped=lambda: self._closed)(self._probe_once)

    async def _probe_once(self) -> bool:
        """Return whether calls go through again."""
        self._trouble.clear()
        await self.probe()
        return not self.blown

    async def probe(self) -> None:
        """Ask the server whether it takes writes, and know the state from then on."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._client.execute_command("SET", self._pulse, "", "EX", PULSE_SECONDS)
        except FAULTS as fault:
            self._note(fault)
            if isinstance(fault, ReadOnlyError):  # the name in the URL leads elsewhere by now
                await self._client.connection_pool.disconnect(inuse_connections=False)
            if _is_deadly(fault):
                return
        else:
            self.full = False
        if self.blown:
            self.blown = False
            log.warning("Redis answers again")
            await self._mended()

    def _note(self, fault: BaseException) -> None:
        if _is_deadly(fault):
            self._blow(fault)
        elif isinstance(fault, OutOfMemoryError):
            if not self.full:
                log.error("Redis is out of memory: new tickets wait in the database for dispatchers that look there")
            self.full = True

    def _blow(self, fault: BaseException) -> None:
        if not self.blown:
            log.warning("Redis does not answer (%s): going on without it", type(fault).__name__)
        self.blown = True
        self._trouble.set()
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():
                call.reschedule(now)


def _is_deadly(fault: BaseException) -> bool:
    """An error that the server sends proves that it lives, unless it says that it has become a replica."""
    return not isinstance(fault, ResponseError) or isinstance(fault, ReadOnlyError)
