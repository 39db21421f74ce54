"""The store as one caller may use it: reads and writes that are made in the name of a tenant.

Gateways take everything that a caller names by an id from here, so that a route that lacks a check shows nothing of
another tenant's: the statement that commits a write compares the tenant. A run of another tenant is as absent as one
that never was. What administers a tenant is read and changed in its name likewise.

Writes to runs are compared on both databases. What is read by an id is kept to the tenant by Postgres's row-level
security (`sqlkit/row_security.py`). SQLite has none, so there it is for the route to check (deploy/docs/security.md).
"""

from typing import Protocol

from app.core.rating.economics import JournaledRun
from app.core.rating.feedback import Feedback
from app.store.protocol.admin_events import PROCESS, Actor, AdminEvents
from app.store.protocol.budgets import Budgets
from app.store.protocol.contents import ContentReads
from app.store.protocol.disclosures import Disclosure, DisclosureQuery
from app.store.protocol.entries import AppendResult, Entry
from app.store.protocol.holds import EVERY_HOLD, Hold, HoldQuery
from app.store.protocol.idempotency import IdempotencyRecord
from app.store.protocol.journal import Journal, RunQuery, RunRow
from app.store.protocol.keys import Keys
from app.store.protocol.retention import PrunedRun
from app.store.protocol.run_lists import RunLists
from app.store.protocol.tenants import Tenants


class TenantStore(ContentReads, Protocol):
    """The verbs of `Store` that a caller's requests need; they promise the same, for the runs of one tenant."""

    async def append(self, entry: Entry) -> AppendResult:
        """Behave as `RunJournal.append` does. `NotFound` if the run is not the tenant's."""
        ...

    async def journal(self, run: str, upto: int | None = None, after: int = 0) -> Journal:
        """Behave as `RunJournal.journal` does."""
        ...

    async def run(self, run: str) -> RunRow:
        """Behave as `RunJournal.run` does."""
        ...

    async def runs(self, query: RunQuery) -> tuple[RunRow, ...]:
        """Behave as `RunJournal.runs` does."""
        ...

    @property
    def lists(self) -> RunLists:
        """Return counts and details of lists of the tenant's runs."""
        ...

    async def journaled_runs(self, query: RunQuery) -> tuple[JournaledRun, ...]:
        """Behave as `Reports.journaled_runs` does."""
        ...

    async def disclosures(self, query: DisclosureQuery) -> tuple[Disclosure, ...]:
        """Behave as `Disclosures.disclosures` does."""
        ...

    async def erase(self, run: str, *, by: Actor = PROCESS) -> bool:
        """Behave as `Contents.erase` does. False if the run is not the tenant's."""
        ...

    async def pruned_run(self, run: str) -> PrunedRun:
        """Behave as `Retention.pruned_run` does."""
        ...

    async def rate(self, rating: Feedback) -> Feedback:
        """Behave as `Learning.rate` does. `NotFound` if the run is not the tenant's."""
        ...

    async def feedback(self, run: str) -> tuple[Feedback, ...]:
        """Behave as `Learning.feedback` does."""
        ...

    async def find_idempotency_record(self, name: str, now: float) -> IdempotencyRecord | None:
        """Behave as `IdempotencyRecords.find_idempotency_record` does."""
        ...

    async def add_idempotency_record(self, once: IdempotencyRecord, now: float) -> IdempotencyRecord:
        """Behave as `IdempotencyRecords.add_idempotency_record` does."""
        ...


class TenantAdministration(Keys, Tenants, Budgets, AdminEvents, Protocol):
    """The administration of a tenant: its keys, its budgets, the log of its changes, its holds and itself.

    On Postgres all of it is read and changed under row-level security: what another tenant has is absent, and a change
    that would give another tenant something raises `NotFound`.
    """

    async def holds(self, query: HoldQuery = EVERY_HOLD) -> tuple[Hold, ...]:
        """Behave as `Holds.holds` does, for the holds on this tenant's runs."""
        ...


class Tenancy(Protocol):
    """The way to a tenant's store."""

    @property
    def lists(self) -> RunLists:
        """Return counts and details of lists of runs of every tenant."""
        ...

    def of_tenant(self, tenant: str | None) -> TenantStore:
        """Return the store for callers of this tenant; None: for those who may see the runs of every tenant."""
        ...

    def administration_of(self, tenant: str | None) -> TenantAdministration:
        """Return the administration for callers of this tenant; None: for those who may see that of every tenant."""
        ...
