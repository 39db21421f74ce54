"""Budgets over several runs, and what is held and spent of them.

Holds are made and settled by entries (`entries.py`): a new run names its accounts, each hold of the run is reserved in
all of them, in the transaction of the entry or not at all, and each outcome settles the hold of its call.
"""

from collections.abc import Mapping
from typing import Protocol

from msgspec import Struct

from app.core.pool.budgets import Budget, Scope
from app.store.protocol.admin_events import PROCESS, Actor


class BudgetUse(Struct, frozen=True):
    """One window of an account. Money is in micro-dollars, times are seconds since 1970.

    `overrun` is the part of `spent` that providers billed beyond the worst case that was held for their calls.
    """

    account: str
    start: int
    end: int
    held: int
    spent: int
    overrun: int
    warned_at: float | None = None


class Budgets(Protocol):
    """All verbs raise `StoreUnavailable`. Each change is logged in its transaction, with its author `by`."""

    async def set_budget(self, budget: Budget, *, by: Actor = PROCESS) -> None:
        """Store a budget. If there is one of its id, its amount, time zone, soft limit and slices are replaced. The
        warnings of accounts that have spent enough for that soft limit already are given with it."""
        ...

    async def remove_budget(self, id_: str, *, by: Actor = PROCESS) -> bool:
        """Remove a budget: nothing is reserved in its accounts any more. False if there is none of this id.

        What was spent stays, and counts again if the budget is set again within the window.
        """
        ...

    async def budget(self, id_: str) -> Budget | None:
        """Return a budget by its id."""
        ...

    async def budgets(
        self, tenant: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> tuple[Budget, ...]:
        """Return the budgets of one tenant, or of all, in the order of their ids, from the one that follows `after`."""
        ...

    async def budget_use(self, id_: str, limit: int, account: str | None = None) -> tuple[BudgetUse, ...]:
        """Return the windows of a budget's accounts, or of one account, the newest first and the highest of those
        first."""
        ...


class BudgetAccounts(Protocol):
    """The accounts of budgets, as the service itself uses them. All verbs raise `StoreUnavailable`."""

    async def sum_up_budget_use(self, before: float) -> int:
        """Replace the windows that ended before this time (seconds since 1970), and in which nothing is held, by one
        sum for each account. Returns how many windows that were."""
        ...

    async def budget_accounts(self, tenant: str, names: Mapping[Scope, str]) -> tuple[str, ...]:
        """Return the accounts of a request with these names (see `core.pool.budgets.accounts`).

        A budget that another process has set for a tenant without any is known after `KNOWN_SECONDS`; until then no
        query is made for that tenant's requests.
        """
        ...


KNOWN_SECONDS = 2.0
"""Seconds for which a process relies on what it knows of the tenants that have budgets."""
