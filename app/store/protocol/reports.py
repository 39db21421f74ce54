"""Runs with their journals and ratings, page by page, for reports over many of them."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from app.core.rating.economics import JournaledRun
from app.store.protocol.journal import RunQuery


class Reports(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        """Return at most `query.limit` runs in the order of the query, each with its events of the kinds that a report
        reads, its ratings without comments, and what its request said of users and metadata until that was erased."""
        ...

    async def catalogs(self, digests: Sequence[str]) -> Mapping[str, bytes]:
        """Return the stored snapshots of pools with these digests (`core/pool/snapshot.py`)."""
        ...
