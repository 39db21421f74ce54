"""Wakes those who look at lists of runs, once any run has changed.

There is one look at the database a second for the whole process, and none while nobody waits. Where an engine tells
this process of events, the look is made at once. Whoever is woken reads its own list again, as far as it may see it.
"""

import asyncio
from contextlib import suppress
from typing import Final

from app.engine.context import EngineContext
from app.errors import StoreUnavailable

POLL_SECONDS: Final = 1.0
"""Time between two looks at the database."""
PAUSE_SECONDS: Final = 0.25
"""Time for which changes are gathered before anybody is woken."""


class RunChanges:
    """Counts changes of runs, whichever process makes them. `run` is to be called for as long as somebody may wait."""

    def __init__(self, context: EngineContext) -> None:
        self._context = context
        self.number = 0
        """Grows with each change. The number may grow without one, never the other way round."""
        self._waiting = 0
        self._is_awaited = asyncio.Event()
        self._noticed = asyncio.Event()
        self._changed = asyncio.Event()
        self._mark: tuple[object, ...] | None = None

    async def run(self, stopping: asyncio.Event) -> None:
        """Look for changes until `stopping` is set."""
        async with asyncio.TaskGroup() as group:
            looking = group.create_task(self._look())
            await stopping.wait()
            looking.cancel()

    def notice(self) -> None:
        """Note that a run has changed."""
        if self._waiting:
            self._noticed.set()

    async def after(self, number: int, seconds: float) -> int:
        """Return the number of changes once it is not `number` any more, or after so many seconds."""
        self._waiting += 1
        self._is_awaited.set()
        try:
            async with asyncio.timeout(seconds):
                while self.number == number:
                    await self._changed.wait()
        except TimeoutError:
            pass
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._is_awaited.clear()
        return self.number

    async def _look(self) -> None:
        while True:
            await self._is_awaited.wait()
            with suppress(TimeoutError):
                async with asyncio.timeout(POLL_SECONDS):
                    await self._noticed.wait()
                    await asyncio.sleep(PAUSE_SECONDS)
            is_noticed = self._noticed.is_set()
            self._noticed.clear()
            if await self._has_changed() or is_noticed:
                self.number += 1
                self._changed.set()
                self._changed.clear()

    async def _has_changed(self) -> bool:
        try:
            mark = await self._context.store.lists.mark()
        except StoreUnavailable:
            return False
        before, self._mark = self._mark, mark
        return mark != before
