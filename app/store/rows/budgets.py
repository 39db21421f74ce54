"""Rows of budgets, and the windows of their accounts. Entries change the windows (see `writing/budget_ledger.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict

from sqlalchemy import Connection, and_, delete, or_, select
from sqlalchemy.dialects import postgresql, sqlite

from app.core.pool.budgets import EVERYBODY, Budget, Scope, accounts
from app.store.protocol import BudgetUse
from app.store.sqlkit.tables import BUDGET_WINDOWS, BUDGETS

_REPLACED = ("usd", "zone", "soft")


def put(conn: Connection, budget: Budget) -> None:
    """Store a budget, or replace amount, time zone and soft limit of the one that has its id."""
    insert = postgresql.insert if conn.dialect.name == "postgresql" else sqlite.insert
    row = asdict(budget) | {"id": budget.id}
    replaced = {name: row[name] for name in _REPLACED}
    conn.execute(insert(BUDGETS).values(row).on_conflict_do_update(index_elements=[BUDGETS.c.id], set_=replaced))


def remove(conn: Connection, id_: str) -> bool:
    """Delete a budget. False if there is none of this id."""
    return bool(conn.execute(delete(BUDGETS).where(BUDGETS.c.id == id_)).rowcount)


def every(conn: Connection, tenant: str | None) -> tuple[Budget, ...]:
    """The budgets of one tenant, or of all, in the order of their ids."""
    query = select(*_COLUMNS).order_by(BUDGETS.c.id)
    if tenant is not None:
        query = query.where(BUDGETS.c.tenant == tenant)
    return tuple([Budget(**row._mapping) for row in conn.execute(query)])


def named(conn: Connection, ids: Sequence[str]) -> tuple[Budget, ...]:
    """The budgets that exist of these ids."""
    return tuple([Budget(**row._mapping) for row in conn.execute(select(*_COLUMNS).where(BUDGETS.c.id.in_(ids)))])


def tenants(conn: Connection) -> frozenset[str]:
    """The tenants that have budgets."""
    return frozenset(conn.execute(select(BUDGETS.c.tenant).distinct()).scalars())


def accounts_of(conn: Connection, tenant: str, names: Mapping[Scope, str]) -> tuple[str, ...]:
    """The accounts of a request with these names."""
    row = BUDGETS.c
    theirs = [and_(row.scope == scope, row.name.in_((name, EVERYBODY))) for scope, name in names.items()]
    query = select(*_COLUMNS).where(row.tenant == tenant, or_(row.scope == "tenant", *theirs))
    return accounts([Budget(**found._mapping) for found in conn.execute(query)], names)


def use(conn: Connection, id_: str, limit: int, account: str | None) -> tuple[BudgetUse, ...]:
    """Windows of a budget, the newest first and the dearest of those first."""
    row = BUDGET_WINDOWS.c
    query = select(*[row[name] for name in BudgetUse.__dataclass_fields__]).where(row.budget == id_)
    if account is not None:
        query = query.where(row.account == account)
    query = query.order_by(row.start.desc(), (row.spent + row.held).desc(), row.account).limit(limit)
    return tuple([BudgetUse(*found) for found in conn.execute(query)])


_COLUMNS = tuple([BUDGETS.c[name] for name in Budget.__dataclass_fields__])
