"""Contents of runs, and the snapshots of pools. Contents are written by entries, and a body never changes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

from app.store.protocol.admin_events import PROCESS, Actor

Reader = Callable[[bytes], Any]
"""A pure function that makes an immutable value of a body."""


class ContentReads(Protocol):
    """Bodies by their content address. Both verbs raise `StoreUnavailable`."""

    async def contents(self, run: str, refs: Sequence[str]) -> Mapping[str, bytes]:
        """Return the bodies that are still stored. A ref that is missing was erased."""
        ...

    async def records(self, run: str, keys: Collection[tuple[str, Reader]]) -> Mapping[tuple[str, Reader], Any]:
        """Return the values that these readers make of these bodies, by ref and reader.

        A value that was made of a cached body is cached with it, and evicted with it.
        """
        ...


class Contents(ContentReads, Protocol):
    """Contents, their erasure, and the snapshots of pools. All verbs raise `StoreUnavailable`."""

    async def erase(self, run: str, *, by: Actor = PROCESS) -> bool:
        """Erase all content of a run, its salt and the comments on it, and log it with its author. The journal stays.
        False if there is no such run. Raises `LegalHold` if a hold covers it."""
        ...

    async def keep_catalog(self, digest: str, snapshot: Callable[[], bytes]) -> None:
        """Store a pool's snapshot under its digest, for the audit. A digest that this store has stored before costs
        nothing."""
        ...
