"""A bounded mailbox between two coroutines of one process: many small messages in, whole batches out.

A consumer that falls behind gets its messages in larger batches instead of one wake-up each, which is what lets one
process relay thousands of deltas a second. `put` never waits: it answers False when the box is full, and every producer
of Baton may drop the message then, because the journal has what it said.
"""

import asyncio
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """One consumer, any number of producers, all in one event loop. Each run has one, and each caller that follows it:
    an empty one is small."""

    __slots__ = ("_bound", "_items", "_waiting")

    def __init__(self, bound: int) -> None:
        self._items: list[T] = []
        self._bound = bound
        self._waiting: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """Add an item; False, and nothing added, if the box is full."""
        if len(self._items) >= self._bound:
            return False
        self.push(item)
        return True

    def push(self, item: T) -> None:
        """Add an item beyond the bound: for the few that must arrive, such as an end."""
        self._items.append(item)
        if self._waiting is not None:
            _wake(self._waiting)

    async def take(self, wait: float) -> list[T]:
        """Everything that is there, as soon as there is something; [] after `wait` seconds.

        A future and a timer of its own: an `Event` under `asyncio.timeout` costs three times as much, and every delta
        goes through two mailboxes.
        """
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(wait, _wake, self._waiting)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        items, self._items = self._items, []
        return items


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)
