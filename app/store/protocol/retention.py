"""Erasing the contents of many runs, for people who ask for it and for the time limits that an operator sets."""

from collections.abc import Sequence
from typing import Protocol

from app.core.records import record
from app.store.protocol.journal import RunRow


@record(frozen=True, slots=True)
class ContentQuery:
    """Filters for runs whose content is still stored: all optional, joined by AND."""

    tenant: str | None = None
    user: str | None = None
    """The end user that the request named (`user`)."""
    before: float | None = None
    """Only runs that were admitted before this time, in seconds since 1970."""


@record(frozen=True, slots=True)
class ContentPage:
    """One page of a search. `following` is the place where the next page begins; None after the last one."""

    runs: tuple[RunRow, ...]
    following: tuple[float, str] | None


class Retention(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def runs_with_content(
        self, query: ContentQuery, after: tuple[float, str] | None = None, limit: int = 200
    ) -> ContentPage:
        """Look through the next `limit` runs, the oldest first, for those whose content was not erased.

        A page may be empty although others follow. A run's user is known from its content only, which is read then.
        """
        ...

    async def erase_contents(self, runs: Sequence[str]) -> int:
        """Erase all content of these runs as `Contents.erase` does, in short transactions. Returns how many runs had
        any."""
        ...

    async def overwrite_erased(self) -> bool:
        """Remove erased bytes from the files of an SQLite database, its write-ahead log included.

        False if a reader was in the way, so that the log still has them until the next checkpoint; and on Postgres,
        which overwrites them itself (see the runbook).
        """
        ...
