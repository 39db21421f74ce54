"""A bounded mailbox between two coroutines of one process: many small messages in, whole batches out.

A consumer that falls behind gets its messages in larger batches instead of one wake-up each, which is what lets one
process relay thousands of deltas a second. `put` never waits: it answers False when the box is full, and every producer
of Baton can afford to drop then (the journal has what a dropped message said).
"""

import asyncio
from collections import deque
from typing import Generic, TypeVar

T = TypeVar("T")


class Mailbox(Generic[T]):
    """One consumer, any number of producers, all in one event loop."""

    def __init__(self, bound: int) -> None:
        self._items: deque[T] = deque()
        self._bound = bound
        self._filled = asyncio.Event()

    def put(self, item: T) -> bool:
        """Add an item; False, and nothing added, if the box is full."""
        if len(self._items) >= self._bound:
            return False
        self._items.append(item)
        self._filled.set()
        return True

    def push(self, item: T) -> None:
        """Add an item beyond the bound: for the few that must arrive, such as an end."""
        self._items.append(item)
        self._filled.set()

    async def take(self, wait: float) -> list[T]:
        """Everything that is there, as soon as there is something; [] after `wait` seconds."""
        if not self._items:
            self._filled.clear()
            try:
                async with asyncio.timeout(wait):
                    await self._filled.wait()
            except TimeoutError:
                return []
        items = list(self._items)
        self._items.clear()
        return items
