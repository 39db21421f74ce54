"""Lists of runs, read page by page."""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Protocol, TypeVar

from msgspec.structs import replace

from app.store.protocol import RunQuery


class ListedRun(Protocol):
    """A run as a list has it."""

    @property
    def id(self) -> str:
        """Return the run's id."""
        ...

    @property
    def created_at(self) -> float:
        """Return when it was admitted, in seconds since 1970."""
        ...


R = TypeVar("R", bound=ListedRun)


async def run_pages(read: Callable[[RunQuery], Awaitable[Sequence[R]]], query: RunQuery) -> AsyncIterator[Sequence[R]]:
    """Yield all that a query selects, sorted by time, in pages of its limit, none of them empty. `read` is
    `RunJournal.runs` or `Reports.journaled_runs`."""
    while page := await read(query):
        yield page
        if len(page) < query.limit:
            return
        query = replace(query, before=(page[-1].created_at, page[-1].id))
