"""The ledger of disclosures: which worker was sent what in each call, and by whose decision.

The rows follow from the events of calls and are written with these, so no verb writes them but the one that derives
those of earlier releases.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol

from msgspec import Struct

from app.core.run.events import Event
from app.core.run.recipients import Recipient, RecipientKind

Place = tuple[float, str]
"""A place in the list of disclosures: the time of one, and the id of its call; or in the list of runs."""

EventCompleter = Callable[[Sequence[Event], Mapping[str, bytes]], Iterable[Event]]
"""Returns the events of calls with all that the ledger needs, from a journal and snapshots of pools by their digests
(`core/run/visibility.py`)."""


class SeenDataFilter(Struct, frozen=True):
    """The things of which a recipient must have seen any to fit a filter."""

    user: bool = False
    """The caller's words."""
    results: bool = False
    """Results of the caller's tools."""
    steps: tuple[int, ...] = ()
    """The output of one of these steps."""
    labels: tuple[str, ...] = ()
    """Anything with one of these labels."""

    @property
    def is_any(self) -> bool:
        """Return True if nothing is asked for, so that every recipient fits."""
        return not (self.user or self.results or self.steps or self.labels)


class DisclosureQuery(Struct, frozen=True):
    """Filters of the list of disclosures: all optional, joined by AND; the values of one filter are joined by OR."""

    recipients: tuple[str, ...] = ()
    kinds: tuple[RecipientKind, ...] = ()
    providers: tuple[str, ...] = ()
    saw: SeenDataFilter = SeenDataFilter()
    since: float | None = None
    """Calls that were intended at this time or later, in seconds since 1970."""
    until: float | None = None
    """Calls that were intended before this time."""
    tenants: tuple[str, ...] = ()
    users: tuple[str, ...] = ()
    """The end users whom the requests named. Of runs whose content was erased they are not known any more."""
    runs: tuple[str, ...] = ()
    keys: tuple[str, ...] = ()
    before: Place | None = None
    """Only rows behind this place in the order of the list."""
    ascending: bool = False
    limit: int = 100


class Disclosure(Recipient, frozen=True):
    """One row: what one recipient of a call was sent, and what came of the call."""

    run: str
    call: str
    at: float
    """When the intent was written, before anything was sent, in seconds since 1970."""
    tenant: str
    key: str
    """The id of the API key that began the run."""
    user: str | None
    """The end user whom the request named; None if it named none, or if the run's content was erased."""
    attempt: int
    passed_over: tuple[tuple[str, str], ...]
    """The workers that were not called instead, each with the reason."""
    bytes: int
    outcome: str | None
    """None while the call has not ended."""
    input_tokens: int | None
    output_tokens: int | None


class RebuildBatch(Struct, frozen=True):
    """One batch of a rebuild: how many runs were looked at, how many rows were added or completed, the place at which
    the next batch begins (None after the last one), and the runs whose journal cannot be read, which get no row."""

    runs: int
    added: int
    following: Place | None
    damaged: tuple[str, ...] = ()


class Disclosures(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def disclosures(self, query: DisclosureQuery) -> tuple[Disclosure, ...]:
        """Return the rows that a query chooses, by default the newest first."""
        ...

    async def rebuild_disclosures(self, after: Place | None, limit: int, complete: EventCompleter) -> RebuildBatch:
        """Derive the rows that calls of the next runs lack, and complete those that lack the outcome that the journal
        has: of `limit` runs at the most, and of as many as the time of one transaction suffices for, but of one at
        least. Runs are taken in the order of (admission, id), those behind `after`; doing it again adds nothing."""
        ...
