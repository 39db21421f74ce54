"""The time that all processes agree on: the database's, carried forward by this machine's monotonic clock.

Leases, claims and deadlines are written by one process and judged by others. A machine whose own clock is minutes off,
or is set while it works, must not find that everybody else's time is up; so its clock is asked once, at the start, and
believed only until the database has been. What the database says is followed when it says so twice, since one odd
answer is not worth a lease.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

from app.errors import BatonError

log = logging.getLogger(__name__)

EVERY = 5.0
"""Seconds between two looks at the database's clock."""
SOON = 0.1
"""Seconds between two looks until the first one has succeeded, and after one that disagrees."""
AGREED = 0.1
"""Seconds of difference that are not worth a change."""
SLOW = 0.5
"""Seconds; an answer that took longer says too little."""
NOTABLE = 1.0
"""Seconds of difference that an operator should hear of."""


class Clock:
    """One process's. `now` may be called from the first moment on; it never goes back but by a correction."""

    def __init__(
        self, wall: Callable[[], float], tick: Callable[[], float], read: Callable[[], Awaitable[float]]
    ) -> None:
        """`wall` gives seconds since 1970 and `tick` monotonic ones; `read` asks the database, and may raise a
        `BatonError`."""
        self._tick = tick
        self._read = read
        self._offset = wall() - tick()
        self._doubt: float | None = None
        """The offset that the database spoke for at the last look, if it was not ours."""
        self.set = False
        """Whether the database has been asked."""

    def now(self) -> float:
        """Seconds since 1970."""
        return self._tick() + self._offset

    async def look(self) -> None:
        """Compare with the database's clock, and follow it if need be."""
        began = self._tick()
        try:
            theirs = await self._read()
        except BatonError:
            return
        ended = self._tick()
        if ended - began > SLOW and self.set:
            return
        offset = theirs - (began + ended) / 2
        if abs(offset - self._offset) <= AGREED:
            self._doubt = None
        elif not self.set or (self._doubt is not None and abs(offset - self._doubt) <= AGREED):
            self._follow(offset)
        else:
            self._doubt = offset
        self.set = True

    def _follow(self, offset: float) -> None:
        difference = offset - self._offset
        if abs(difference) >= NOTABLE:
            log.warning("the clock of this machine is %+.1f s from the database's, which is followed", -difference)
        self._offset, self._doubt = offset, None

    async def keep(self, stopping: asyncio.Event) -> None:
        """Look now and then until `stopping` is set."""
        while not stopping.is_set():
            await self.look()
            with suppress(TimeoutError):
                async with asyncio.timeout(EVERY if self.set and self._doubt is None else SOON):
                    await stopping.wait()
