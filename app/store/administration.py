"""The verbs of the store about API keys, tenants, budgets and legal holds, and about who changed them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

from sqlalchemy import Connection

from app.core.pool.budgets import Budget
from app.store.protocol import (
    EVERY_HOLD,
    EVERY_KEY,
    PROCESS,
    Actor,
    AdminEvent,
    AdminEventQuery,
    BudgetUse,
    Hold,
    HoldQuery,
    IdempotencyRecord,
    KeyQuery,
    KeyRow,
    SpendQuery,
    SpendRow,
    TenantRow,
)
from app.store.rows import admin_events, budgets, holds, keys, spending, tenants

T = TypeVar("T")


class Administration(ABC):
    """The base class with these verbs of the store, and of what a caller of one tenant may do with it (`sql.py`).
    `protocol` documents all public methods."""

    @abstractmethod
    async def _read(self, work: Callable[[Connection], T], *, brief: bool = False) -> T:
        """Carry out work that reads (see `Runner.read`: each of its statements sees what was committed before it)."""

    @abstractmethod
    async def _write(self, work: Callable[[Connection], T]) -> T:
        """Carry out work in a transaction of its own, and commit it."""

    @abstractmethod
    def note_budget_change(self, id_: str, warnings: int) -> None:
        """Learn that a budget is another one now, and how many of its accounts were warned for that reason."""

    async def key(self, public_id: str) -> KeyRow | None:
        return await self._read(partial(keys.find, public_id=public_id))

    async def keys(self, query: KeyQuery = EVERY_KEY) -> tuple[KeyRow, ...]:
        return await self._read(partial(keys.page, query=query))

    async def add_key(self, row: KeyRow, *, by: Actor = PROCESS) -> bool:
        return await self._write(partial(keys.add, key=row, by=by))

    async def revoke_key(self, public_id: str, at: float, *, by: Actor = PROCESS) -> bool:
        return await self._write(partial(keys.revoke, public_id=public_id, at=at, by=by))

    async def rotate_key(
        self,
        public_id: str,
        digest: bytes,
        until: float,
        pepper: str | None = None,
        *,
        by: Actor = PROCESS,
        once: IdempotencyRecord | None = None,
        now: float = 0.0,
    ) -> bool:
        work = partial(keys.rotate, public_id=public_id, digest=digest, until=until, pepper=pepper, by=by)
        return await self._write(partial(work, once=once, now=now))

    async def rehash_key(self, public_id: str, *, was: bytes, digest: bytes, pepper: str) -> bool:
        return await self._write(partial(keys.rehash, public_id=public_id, was=was, digest=digest, pepper=pepper))

    async def tenants(
        self, name: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> tuple[TenantRow, ...]:
        return await self._read(partial(tenants.page, name=name, after=after, limit=limit))

    async def add_tenant(self, name: str, at: float, *, by: Actor = PROCESS) -> bool:
        return await self._write(partial(tenants.add, name=name, at=at, by=by))

    async def switch_tenant(self, name: str, at: float, *, enabled: bool, by: Actor = PROCESS) -> bool:
        return await self._write(partial(tenants.switch, name=name, at=at, enabled=enabled, by=by))

    async def set_budget(self, budget: Budget, *, by: Actor = PROCESS) -> None:
        self.note_budget_change(budget.id, await self._write(partial(budgets.put, budget=budget, by=by)))

    async def remove_budget(self, id_: str, *, by: Actor = PROCESS) -> bool:
        return await self._write(partial(budgets.remove, id_=id_, by=by))

    async def budget(self, id_: str) -> Budget | None:
        budgets_of_id = await self._read(partial(budgets.of_ids, ids=[id_]))
        return budgets_of_id[0] if budgets_of_id else None

    async def budgets(
        self, tenant: str | None = None, *, after: str | None = None, limit: int | None = None
    ) -> tuple[Budget, ...]:
        return await self._read(partial(budgets.page, tenant=tenant, after=after, limit=limit))

    async def budget_use(self, id_: str, limit: int, account: str | None = None) -> tuple[BudgetUse, ...]:
        return await self._read(partial(budgets.use, id_=id_, limit=limit, account=account))

    async def holds(self, query: HoldQuery = EVERY_HOLD) -> tuple[Hold, ...]:
        return await self._read(partial(holds.page, query=query))

    async def spending(self, query: SpendQuery) -> tuple[SpendRow, ...]:
        return await self._read(partial(spending.sums, query=query))

    async def note_read(self, run: str, tenant: str, what: str, *, by: Actor, digest: str = "") -> None:
        write = partial(admin_events.note_read, run=run, tenant=tenant, what=what, by=by, digest=digest)
        if not digest or not await self._read(partial(admin_events.has_read, run=run, what=what, by=by, digest=digest)):
            await self._write(write)

    async def note_retention(self, periods: Mapping[str, str]) -> None:
        await self._write(partial(admin_events.note_retention, periods=periods))

    async def admin_events(self, query: AdminEventQuery) -> tuple[AdminEvent, ...]:
        return await self._read(partial(admin_events.page, query=query))
