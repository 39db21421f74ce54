"""Outcomes of calls that could not be written yet, kept while the database is away.

The outcome of a call exists only here, so it is kept: bounded, written in the order in which it came, and without a
slot, so that other steps can use it.
"""

import asyncio
from collections.abc import Awaitable, Callable

from app.errors import StoreUnavailable
from app.store.protocol import Entry, Store
from app.telemetry import Telemetry

OUTCOME_PATIENCE = 90.0
"""Seconds for which an outcome is kept."""
ENTRIES, BYTES = 1_024, 64 * 2**20
"""Most that one process keeps: entries, and bytes of content in them."""
ENTRY_BYTES = 2_048
"""The size of an entry without its content, roughly, in bytes."""
PAUSE, LOOK = 0.05, 1.0
"""Seconds between two tries; between two looks whether the database is there, at the most."""


class PendingOutcomes:
    """The last entries of a dispatcher's steps, while they cannot be written."""

    def __init__(
        self,
        store: Store,
        telemetry: Telemetry,
        *,
        tick: Callable[[], float],
        freed: Callable[[], None],
        entries: int = ENTRIES,
        size: int = BYTES,
    ) -> None:
        """`freed` is called whenever a step gives up its slot or there is room again."""
        self._store = store
        self._telemetry = telemetry
        self._tick = tick
        self._freed = freed
        self._most, self._most_bytes = entries, size
        self._kept: dict[int, int] = {}
        """The bytes of each entry that is kept without a slot, by the order in which it came."""
        self._line: dict[int, asyncio.Future[None]] = {}
        self._filled = asyncio.Event()
        self._closed = False
        self._numbers = 0

    def __len__(self) -> int:
        """The number of steps that are kept without a slot."""
        return len(self._kept)

    @property
    def full(self) -> bool:
        """True if no step may be begun, because there would be no room for its outcome."""
        return len(self._kept) >= self._most or sum(self._kept.values()) >= self._most_bytes

    async def write_later(self, entry: Entry, append: Callable[[], Awaitable[None]]) -> None:
        """Keep an entry that the database did not take, and call `append` in its turn until that has taken it.

        Raises `StoreUnavailable` when that took too long.
        """
        number = self._keep(ENTRY_BYTES + sum(len(body) for _, body in entry.contents))
        until = self._tick() + OUTCOME_PATIENCE
        try:
            while not self._closed and (left := until - self._tick()) > 0:
                if await self._turn(number, left):
                    try:
                        return await append()
                    except StoreUnavailable:
                        continue
            raise StoreUnavailable
        finally:
            self._let_go(number)

    def _keep(self, weight: int) -> int:
        """Keep an entry beyond its slot if there is room; returns its number."""
        self._numbers += 1
        if not self.full:
            self._kept[self._numbers] = weight
            self._changed()
        return self._numbers

    def _let_go(self, number: int) -> None:
        if self._kept.pop(number, None) is not None:
            self._changed()

    def _changed(self) -> None:
        self._telemetry.gauge("baton_outcomes_waiting", len(self._kept))
        self._telemetry.gauge("baton_outcomes_waiting_bytes", sum(self._kept.values()))
        self._freed()

    async def _turn(self, number: int, left: float) -> bool:
        """Wait until it is this entry's turn; False if its time is over."""
        self._line[number] = turn = asyncio.get_running_loop().create_future()
        self._filled.set()
        try:
            async with asyncio.timeout(left):
                await turn
        except TimeoutError:
            return False
        return True

    async def keep(self) -> None:
        """Let the entries that wait be written, in their order, whenever the database is there; until closed."""
        while not self._closed:
            await self._filled.wait()
            self._filled.clear()
            while self._line and not self._closed:
                if await self._store.wait_until_healthy(LOOK):
                    self._release()
                    await asyncio.sleep(PAUSE)

    def _release(self) -> None:
        line, self._line = self._line, {}
        for _, turn in sorted(line.items()):
            if not turn.done():
                turn.set_result(None)

    def close(self) -> None:
        """Give up what still waits: this process ends, and others will find these calls without an outcome."""
        self._closed = True
        self._filled.set()
        self._release()
