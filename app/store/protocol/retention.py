"""Erasing the contents of many runs, and deleting all rows of old ones (*pruning*), for people who ask for it and for
the time limits that an operator sets."""

from collections.abc import Sequence
from typing import Protocol

from msgspec import Struct

from app.core.run.retention_classes import RunClass
from app.store.protocol.admin_events import PROCESS, Actor
from app.store.protocol.journal import ErasedBy, RunRow


class ContentQuery(Struct, frozen=True):
    """Filters for runs whose content is still stored: all optional, joined by AND."""

    tenant: str | None = None
    user: str | None = None
    """The end user that the request named, by `user` or by `safety_identifier`."""
    before: float | None = None
    """Only runs that were admitted before this time, in seconds since 1970."""
    within: RunClass | None = None
    without: tuple[RunClass, ...] = ()
    """Only runs of the class `within`, and of none of these."""


class ContentPage(Struct, frozen=True):
    """One page of a search. `following` is the place where the next page begins; None after the last one."""

    runs: tuple[RunRow, ...]
    settled: bool
    """True if all runs that were looked through have ended, the ones that are not on the page included."""
    following: tuple[float, str] | None


class PruneQuery(Struct, frozen=True):
    """Selects runs that may be pruned: they have ended, both times are over, in seconds since 1970, all of their events
    are sealed in the transparency log, and no legal hold covers them."""

    ended_before: float
    deadline_before: float
    """No idempotency record lasts on a run whose last deadline is before this."""
    within: RunClass | None = None
    without: tuple[RunClass, ...] = ()
    """Only runs of the class `within`, and of none of these."""
    on_hold: bool = False
    """True: the runs that would be selected if no legal hold covered them, to be counted."""
    unsealed: bool = False
    """True: the runs that would be selected if all of their events were sealed, to be counted."""


class PrunedRun(Struct, frozen=True):
    """The one row that stays of a run when it is pruned."""

    id: str
    tenant: str
    state: str
    created_at: float
    ended_at: float
    pruned_at: float
    """Set by `Retention.prune`, by the clock of the database."""
    events: int
    root: bytes
    """The Merkle root of its events (`core/run/journal_hash.py`), by which a copy of its journal is proved right."""
    archive: str
    """Where its journal was archived; empty if it was not."""


class Retention(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def runs_with_content(
        self, query: ContentQuery, after: tuple[float, str] | None = None, limit: int = 200
    ) -> ContentPage:
        """Look through the next `limit` runs, the oldest first, for those whose content was not erased.

        A page may be empty although others follow. A run's user is known from its content only, which is read then.
        """
        ...

    async def runs_with_ref(self, ref: str) -> Sequence[str]:
        """Return the runs that have a content of this ref: one, unless two runs have the same salt."""
        ...

    async def runs_with_text(self, runs: Sequence[str], text: bytes) -> Sequence[str]:
        """Return the runs among these that have this text: as a whole content, or as a whole string in one that is
        JSON."""
        ...

    async def erase_contents(self, runs: Sequence[str], cause: ErasedBy = "operator", *, by: Actor = PROCESS) -> int:
        """Erase all content of these runs as `Contents.erase` does, in short transactions, and note the cause. Returns
        how many runs had any. Runs that a legal hold covers are left out. What is erased because its time is over is
        not logged."""
        ...

    async def prune(self, runs: Sequence[tuple[PrunedRun, int]], *, by: Actor = PROCESS) -> Sequence[str]:
        """Delete all rows of these runs in short transactions, but for one row each. Returns the runs that are gone.
        What the service itself prunes, because its time is over, is not logged.

        Each run comes with the revision in which its row was read. A run that is still open or that was changed since,
        by the outcome of a late call, a rating or an erasure, stays as it is, and so does one that a legal hold covers.
        """
        ...

    async def pruned_run(self, run: str) -> PrunedRun:
        """Return the row that stays of a pruned run. Raises `NotFound`."""
        ...

    async def overwrite_erased(self) -> bool:
        """Remove erased bytes from the files of an SQLite database, its write-ahead log included.

        False if a reader was in the way, so that the log still has them until the next checkpoint, or the file is too
        large to be written anew; and on Postgres, which overwrites them itself (deploy/docs/erasing.md).
        """
        ...
