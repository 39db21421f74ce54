"""Availability of the database, as this process finds it, and one probe that waits for its return for all callers.

Every call reports whether it reached the database. After one that did not, the probe writes a row several times a
second until that succeeds. Then all waiting callers are woken, in the order in which they came.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.errors import BatonError
from app.network import retries

log = logging.getLogger(__name__)


class DatabaseAvailability:
    """The availability of one store's database. See `protocol.Availability` for what the store promises of it."""

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        """`probe` returns if the database takes writes, else it raises a `BatonError`; both within bounded time."""
        self._probe = probe
        self._suspected = asyncio.Event()
        self._reached = asyncio.Event()
        self._reached.set()
        self._recovered_at = float("-inf")
        self._closing = asyncio.Event()
        self.finished = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """True if the last call that reported reached the database."""
        return self._reached.is_set()

    @property
    def seconds_since_recovery(self) -> float:
        """Seconds since the database came back; 0 while it is away, infinite if it was never away."""
        return asyncio.get_running_loop().time() - self._recovered_at if self.healthy else 0.0

    def report_away(self) -> None:
        """Report a call that did not reach the database."""
        if self.healthy:
            log.warning("the database is away: writes wait until it is back")
        self._reached.clear()
        self._suspected.set()

    def report_reached(self) -> None:
        """Report a call that succeeded."""
        if not self.healthy:
            log.warning("the database is back")
            self._recovered_at = asyncio.get_running_loop().time()
            self._reached.set()

    async def wait_until_healthy(self, seconds: float) -> bool:
        """Wait for the database, at most for this long. False if it is still away."""
        try:
            async with asyncio.timeout(seconds):
                await self._reached.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Probe the database while it is away, until `close`."""
        while not self._closing.is_set():
            await self._suspected.wait()
            self._suspected.clear()
            if not self.healthy:
                await self._sleep(retries.DATABASE_PROBE_FIRST)
                await retries.database_probe(stopped=self._closing.is_set, sleep=self._sleep)(self._try)
        self.finished.set()

    async def _sleep(self, seconds: float) -> None:
        """Sleep, or return at once when this is closed."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._closing.wait()

    async def _try(self) -> bool:
        """Probe once, unless a call has succeeded since; return whether the database is healthy."""
        if self.healthy or self._closing.is_set():
            return True
        try:
            await self._probe()
        except BatonError:
            return False
        except Exception as error:  # any fault of the driver with a broken database: the next probe may succeed
            log.debug("a probe of the database failed with %s; the next one follows", type(error).__name__)
            return False
        self.report_reached()
        return True

    def close(self) -> None:
        """Let `run` return, after which `finished` is set."""
        self._closing.set()
        self._suspected.set()
