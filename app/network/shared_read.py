"""A value that many callers need, read once for all who wait for it."""

import asyncio
from collections.abc import Awaitable, Callable
from math import inf
from typing import Generic, TypeVar

from app.errors import StoreUnavailable

T = TypeVar("T")


class SharedRead(Generic[T]):
    """A value of the database that is used for so many seconds, and then read anew by the next who needs it.

    Callers that come while it is being read wait for that read, and its failure is theirs, too: each waits for one
    read at most, and not for those of all who came before.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._read = read
        self._seconds = seconds
        self._lock = asyncio.Lock()
        self._value: T | None = None
        self._read_at = -inf
        """The loop's time when the latest value came."""
        self._failed_at = -inf
        """The loop's time when a read failed for the last time."""

    async def get(self) -> T:
        """Return the value. Raises `StoreUnavailable` if it cannot be read."""
        loop = asyncio.get_running_loop()
        called_at = loop.time()
        async with self._lock:
            if self._failed_at > called_at:
                raise StoreUnavailable()
            if self._value is not None and loop.time() - self._read_at <= self._seconds:
                return self._value
            try:
                self._value = await self._read()
            except StoreUnavailable:
                self._failed_at = loop.time()
                raise
            self._read_at = loop.time()
            return self._value

    def forget(self) -> None:
        """Have the value read anew by the next who needs it, because it was changed here."""
        self._read_at = -inf
