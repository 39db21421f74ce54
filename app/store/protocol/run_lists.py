"""Lists of runs: how many there are, details of a page's runs, and whether any run has changed."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from app.core.records import record
from app.store.protocol.journal import RunQuery


@record(frozen=True, slots=True)
class RunDetails:
    """Facts about a run that its row does not have."""

    workers: tuple[str, ...] = ()
    """The workers that were sent something for a step, by name."""
    is_preview: bool = False
    """True if the run was only planned."""


class RunLists(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def count(self, query: RunQuery, most: int) -> int:
        """The number of runs that the query selects, whatever its limit; counted up to `most`."""
        ...

    async def details(self, runs: Sequence[str]) -> Mapping[str, RunDetails]:
        """The details of each of these runs."""
        ...

    async def mark(self) -> tuple[object, ...]:
        """A value that is another one once a run was admitted, an open run has another event, or a run has ended."""
        ...
