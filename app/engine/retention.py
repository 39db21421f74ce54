"""Erasing the content of many runs: by somebody's request, or because the operator's time limit has passed.

Content is every text of a run: what was asked, planned and answered, and the comments on it. Its salt is erased with
it, so that the hashes in the journal prove nothing about it any more. The journal itself stays: ids, states, money.
Erasing goes on in pages and short transactions, so that writers of other runs hardly wait.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress

from app.core.records import record
from app.engine.context import EngineContext
from app.errors import OursError
from app.store.protocol import ContentQuery, Once, Retention, RunRow

PAGE = 200
"""Runs that are looked through at a time."""
LOOK_SECONDS = 60.0
"""Time between two looks for content whose time is over."""
CLAIM = "retention"
"""Id of the claim by which one engine at a time does this work. The claims of requests have hashes as ids."""
End = Callable[[Sequence[RunRow]], Awaitable[None]]
"""Asks open runs to end, and waits a little for that."""


@record(frozen=True, slots=True)
class Erased:
    """The result of an erasure."""

    runs: int
    overwritten: bool
    """True if the erased bytes are gone from the database's files; see `Retention.overwrite_erased`."""


async def runs_with_content(store: Retention, query: ContentQuery) -> AsyncIterator[tuple[RunRow, ...]]:
    """All runs that a query selects, page by page, the oldest first."""
    place: tuple[float, str] | None = None
    while True:
        page = await store.runs_with_content(query, place, PAGE)
        if page.runs:
            yield page.runs
        if page.following is None:
            return
        place = page.following


async def erase_matching(store: Retention, query: ContentQuery, end: End) -> Erased:
    """Erase the content of all runs that a query selects. Those that are open are ended first, as far as possible.

    A run that does not end in time is erased all the same: nothing of it is stored from then on, and it fails.
    """
    erased = 0
    async for rows in runs_with_content(store, query):
        if open_rows := [row for row in rows if row.ended_at is None]:
            await end(open_rows)
        erased += await store.erase_contents([row.id for row in rows])
    return Erased(erased, await store.overwrite_erased())


class ContentRetention:
    """The task of an engine that erases content once its time is over. One engine of the service does so at a time."""

    def __init__(self, context: EngineContext, *, seconds: float | None) -> None:
        """Content is erased when its run has ended and was admitted longer ago than `seconds`; None: never."""
        self._context = context
        self._seconds = seconds
        self._mine = context.name("retention").encode()
        self._place: tuple[float, str] | None = None
        """Where the next look begins: all runs before it are erased."""

    async def run(self, stopping: asyncio.Event) -> None:
        """Look again and again, until the process stops."""
        while self._seconds is not None and not stopping.is_set():
            try:
                await self.look(stopping)
            except OursError as error:
                self._log(logging.WARNING, "Expired content waits for the database.", error=error.public_code)
            with suppress(TimeoutError):
                async with asyncio.timeout(LOOK_SECONDS):
                    await stopping.wait()

    async def look(self, stopping: asyncio.Event) -> None:
        """Erase all content whose time is over, unless another engine does. Pauses as long as it works, so that the
        database has half of its time for runs."""
        if self._seconds is None or not self._context.timed() or not await self._claimed():
            return
        query = ContentQuery(before=self._context.now() - self._seconds)
        place, all_ended, erased = self._place, True, 0
        while not stopping.is_set():
            began = self._context.tick()
            page = await self._context.store.runs_with_content(query, place, PAGE)
            over = [row.id for row in page.runs if row.ended_at is not None]
            all_ended = all_ended and len(over) == len(page.runs)
            erased += await self._context.store.erase_contents(over)
            place = page.following
            if place is None or not await self._claimed():
                break
            if all_ended:
                self._place = place
            await asyncio.sleep(self._context.tick() - began)
        if erased:
            await self._context.store.overwrite_erased()
            self._context.telemetry.count("baton_contents_erased_total", by=erased)
            self._log(logging.INFO, "The content of runs was erased because its time is over.", count=erased)

    async def _claimed(self) -> bool:
        """Claim this work until after the next look, unless a claim lasts. False if it is another engine's."""
        now = self._context.now()
        claim = Once(CLAIM, self._mine, now + 2 * LOOK_SECONDS)
        return (await self._context.store.claim_request(claim, now)).fingerprint == self._mine

    def _log(self, level: int, message: str, **fields: object) -> None:
        self._context.telemetry.log(level, message, **fields)
