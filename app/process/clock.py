"""The time that all processes agree on: the database's, carried forward by this machine's monotonic clock.

Leases, claims and deadlines are written by one process and compared by others. A machine whose own clock is minutes
off, or is set while it works, must not conclude that the leases of all others have expired. Its clock is therefore read
once, at the start, and used only until the database has answered. A correction is made when the database has shown the
same difference twice, since a single slow answer is no reason to lose a lease.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from app.engine.periodic import wait_for_event
from app.errors import BatonError

log = logging.getLogger(__name__)

READING_INTERVAL_SECONDS = 5.0
"""Seconds between two readings of the database's clock."""
RETRY_INTERVAL_SECONDS = 0.1
"""Seconds between two readings until the first one has succeeded, and after one that disagrees."""
TOLERANCE_SECONDS = 0.1
"""Differences up to this many seconds are ignored."""
MAX_ANSWER_SECONDS = 0.5
"""Answers that took longer than this many seconds are ignored, because their error is too large."""
INITIAL_READINGS = 3
"""How often a database is asked before the process listens, if it does not answer in time."""
LOGGED_DIFFERENCE_SECONDS = 1.0
"""Differences from this many seconds on are logged."""


class Clock:
    """The clock of one process. `now` may be called at any time, and goes back only when it is corrected."""

    def __init__(
        self, wall: Callable[[], float], tick: Callable[[], float], ask_database: Callable[[], Awaitable[float]]
    ) -> None:
        """`wall` gives seconds since 1970 and `tick` monotonic ones; `ask_database` asks the database, and may raise a
        `BatonError`."""
        self._tick = tick
        self._read_database_clock = ask_database
        self._offset = wall() - tick()
        self._unconfirmed_offset: float | None = None
        """The offset that the last reading gave, if it differs from the one in use."""
        self.is_set = False
        """True once the database has been read."""

    def now(self) -> float:
        """Return the seconds since 1970."""
        return self._tick() + self._offset

    async def read_at_start(self) -> None:
        """Look until that succeeds, a few times at most. Until the time is known every new run is refused, so a slow
        database is asked again before the process listens; one that refuses is not waited for."""
        for _ in range(INITIAL_READINGS):
            began = self._tick()
            await self.read()
            if self.is_set or self._tick() - began < MAX_ANSWER_SECONDS:
                return

    async def read(self) -> None:
        """Read the database's clock, and correct this one if the difference is confirmed."""
        start = self._tick()
        try:
            theirs = await self._read_database_clock()
        except BatonError:
            return
        end = self._tick()
        if end - start > MAX_ANSWER_SECONDS and self.is_set:
            return
        offset = theirs - (start + end) / 2
        if abs(offset - self._offset) <= TOLERANCE_SECONDS:
            self._unconfirmed_offset = None
        elif not self.is_set or self._confirms(offset):
            self._correct(offset)
        else:
            self._unconfirmed_offset = offset
        self.is_set = True

    def _confirms(self, offset: float) -> bool:
        """Return True if this offset is the one that the reading before has shown."""
        if self._unconfirmed_offset is None:
            return False
        return abs(offset - self._unconfirmed_offset) <= TOLERANCE_SECONDS

    def _correct(self, offset: float) -> None:
        difference = offset - self._offset
        if abs(difference) >= LOGGED_DIFFERENCE_SECONDS:
            log.warning("The clock of this machine is %+.1f s from the database's, which is followed.", -difference)
        self._offset, self._unconfirmed_offset = offset, None

    async def keep_reading(self, stopping: asyncio.Event) -> None:
        """Read the database's clock regularly until `stopping` is set."""
        while not stopping.is_set():
            await self.read()
            interval = RETRY_INTERVAL_SECONDS
            if self.is_set and self._unconfirmed_offset is None:
                interval = READING_INTERVAL_SECONDS
            await wait_for_event(stopping, interval)
