"""Erasing the content of many runs: by somebody's request, or because an operator's time limit has passed.

Content is every text of a run: what was asked, planned and answered, and the comments on it. Its salt is erased with
it, so that the hashes in the journal prove nothing about it any more. The journal itself stays: ids, states, money.
Erasing goes on in pages and short transactions, so that writers of other runs hardly wait.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

from app.core.records import record
from app.store.protocol import ContentQuery, Retention, RunRow

PAGE = 200
"""Runs that are looked through at a time."""
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
