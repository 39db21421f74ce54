"""A deadline for each of the many reads of a stream, from one timer for all of them."""

import asyncio
import math
from collections.abc import Awaitable
from typing import TypeVar

T = TypeVar("T")


class ReadTimer:
    """Ends a read that is not over at its deadline.

    `asyncio.timeout_at` sets a timer and cancels it for each read, which costs as much as all the rest of a delta. This
    timer is set anew only when it expires too early, which is mostly once in a call. For one reader at a time.
    """

    def __init__(self) -> None:
        """Sets no timer yet; needs a running loop."""
        self._loop = asyncio.get_running_loop()
        self._handle: asyncio.TimerHandle | None = None
        self._until = math.inf
        self._reader: asyncio.Task[object] | None = None
        self._expired = False

    async def read(self, read: Awaitable[T], until: float) -> T:
        """The result of `read`; TimeoutError if there is none at the loop's time `until`."""
        if self._handle is None or until < self._handle.when():
            self._set(until)
        reader = self._reader = asyncio.current_task()
        assert reader is not None
        cancelled_before = reader.cancelling()
        self._until = until
        try:
            return await read
        except asyncio.CancelledError:
            # As `asyncio.timeout` does: a cancellation from elsewhere goes first.
            if self._expired and reader.uncancel() <= cancelled_before:
                raise TimeoutError from None
            raise
        finally:
            self._until = math.inf
            self._reader = None
            self._expired = False

    def close(self) -> None:
        """Cancel the timer."""
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None

    def _set(self, at: float) -> None:
        self.close()
        self._handle = self._loop.call_at(at, self._expire)

    def _expire(self) -> None:
        self._handle = None
        if self._reader is None:
            return
        if self._loop.time() >= self._until:
            self._expired = True
            self._reader.cancel()
        else:
            self._set(self._until)
