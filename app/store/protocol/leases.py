"""Leases of drivers on runs, and the outbox: tickets of steps, and the claims of dispatchers on them.

Leases and tickets are made, and change hands, in entries (`entries.py`). Here they are renewed, counted, looked up and
taken over from processes that have stopped renewing them.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

from msgspec import Struct

from app.store.protocol.journal import RunRow


class LapsedRuns(Struct, frozen=True):
    """The number of open runs of one tier and code version whose lease lapsed, how many of them are past their
    deadline, and how many of the others are to be cancelled."""

    tier: str
    code: str
    runs: int
    expired: int
    cancelled: int


class Backlog(Struct, frozen=True):
    """The work of the whole service that no engine has taken: tickets of steps, and runs without an engine."""

    waiting: int
    oldest_since: float | None
    """Seconds since 1970 at which the oldest of it could first have been taken; None if there is none."""


class TicketRow(Struct, frozen=True):
    """A ticket's row in the outbox, as a dispatcher or a sweep sees it."""

    run: str
    step: int
    tier: str
    driver: str
    version: int
    claim: int
    until: float
    seq: int
    """Sequence number of the run's last event when the row was read."""
    holder: str | None = None
    """The dispatcher that has the claim, lapsed or not. None if nobody has it."""
    lost: int = 0
    """Number of earlier claims that lapsed without an outcome."""
    tenant: str = ""
    """The tenant of the run."""


class TicketClaim(NamedTuple):
    """A claim of this process on a ticket. It is a tuple, as are the rows in which thousands of them are looked up."""

    run: str
    step: int
    claim: int


class LeasesAndOutbox(Protocol):
    """All verbs raise `StoreUnavailable`. Times are in seconds since 1970."""

    async def renew_leases(self, driver: str, epochs: Mapping[str, int], until: float) -> Mapping[str, int]:
        """Prolong the leases of a driver on runs, given with their epochs.

        Returns those runs that are still the driver's and have not ended, each with the `seq` of its last event.
        """
        ...

    async def begin_generation(self, now: float) -> float | None:
        """Raise all epochs and claims of open runs beyond any that was given out, after a restore: whoever held a run
        or a step has lost it. Returns the time of the journal's last event, None if it is empty."""
        ...

    async def count_lapsed_runs(self, now: float) -> tuple[LapsedRuns, ...]:
        """Return the number of runs that wait to be taken over, by tier and code version."""
        ...

    async def count_untaken_runs(self, now: float) -> Mapping[str, int]:
        """Return the number of runs that wait for an engine, by tenant."""
        ...

    async def take_over(
        self,
        driver: str,
        now: float,
        until: float,
        limit: int,
        kinds: Sequence[tuple[str, str]],
        cancelled_kinds: Sequence[tuple[str, str]] = (),
    ) -> tuple[RunRow, ...]:
        """Take over runs whose lease lapsed, and their tickets: the epoch is one higher, the driver is this one.

        Those are taken whose (tier, code) is among `kinds`; those to be cancelled whose (tier, code) is among
        `cancelled_kinds`; and those of any kind past their deadline. The tenant with the fewest runs that are driven
        comes first, each time that one is taken, and its oldest run. Returns the rows after the change.
        """
        ...

    async def renew_claims(self, claims: Sequence[TicketClaim], until: float) -> frozenset[TicketClaim]:
        """Prolong claims on tickets. Returns the claims that are still valid."""
        ...

    async def find_ticket(self, run: str, step: int) -> TicketRow | None:
        """Return one ticket as it is now, or None if the step has none."""
        ...

    async def backlog(self, now: float, most: int) -> Backlog:
        """Return the work that waits for an engine; of tickets and of runs, at most `most` are counted each."""
        ...

    async def announce_overdue_tickets(
        self, now: float, limit: int, grace: float | None = None
    ) -> tuple[TicketRow, ...]:
        """Return tickets without a valid claim whose last announcement nobody answered for `grace` seconds (None: a
        lease).

        They count as announced from then on: the next call leaves them out until they were not answered for as long
        again.
        """
        ...
