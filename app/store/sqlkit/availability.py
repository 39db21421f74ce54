"""Whether the database is there, as this process finds it; and one probe that waits for its return on behalf of all.

Every call tells what it found. After one that met no database the probe writes a row several times a second until that
goes through; then everybody who waited is woken, in the order in which they came.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.errors import BatonError
from app.network import retries

log = logging.getLogger(__name__)


class DatabaseAvailability:
    """One store's."""

    def __init__(self, probe: Callable[[], Awaitable[None]]) -> None:
        """`probe` returns if the database takes writes, else raises a `BatonError`, in bounded time."""
        self._probe = probe
        self._trouble = asyncio.Event()
        self._there = asyncio.Event()
        self._there.set()
        self._since = float("-inf")
        self._closing = asyncio.Event()
        self.finished = asyncio.Event()

    @property
    def healthy(self) -> bool:
        """Whether the last word was good."""
        return self._there.is_set()

    @property
    def seconds_since_recovery(self) -> float:
        """Seconds since it came back; infinite if it was never away."""
        return asyncio.get_running_loop().time() - self._since if self.healthy else 0.0

    def away(self) -> None:
        """A call met no database."""
        if self.healthy:
            log.warning("the database is away: what is to be written waits for it")
        self._there.clear()
        self._trouble.set()

    def there(self) -> None:
        """A call got through."""
        if not self.healthy:
            log.warning("the database is back")
            self._since = asyncio.get_running_loop().time()
            self._there.set()

    async def wait_until_healthy(self, seconds: float) -> bool:
        """Until it is there, but no longer than that; whether it is."""
        try:
            async with asyncio.timeout(seconds):
                await self._there.wait()
        except TimeoutError:
            return False
        return True

    async def keep(self) -> None:
        """Probe whenever there is reason to, until closed."""
        while not self._closing.is_set():
            await self._trouble.wait()
            self._trouble.clear()
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
        except Exception as error:  # whatever a driver makes of a broken database: the next probe may succeed
            log.debug("a probe failed with %s", type(error).__name__)
            return False
        self.there()
        return True

    def close(self) -> None:
        """Let `keep` return, after which it is `finished`."""
        self._closing.set()
        self._trouble.set()
