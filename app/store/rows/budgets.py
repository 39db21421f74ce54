"""Rows of budgets, and the windows of their accounts. Entries change the windows (see `writing/budget_ledger.py`)."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from sqlalchemy import ColumnElement, Connection, and_, delete, func, literal_column, or_, select, tuple_, update

from app.core.pool.budgets import EVERYBODY, Budget, Scope, Window, accounts
from app.core.run import notices
from app.store.protocol import Actor, BudgetUse
from app.store.rows import runs
from app.store.rows.admin_events import note
from app.store.sqlkit.tables import BUDGET_WINDOWS, BUDGETS, NOTICES, insert_into

EARLIER = 0
"""The start of the row into which an account's old windows are summed up, so that the account's sums stay."""
AT_ONCE = 5_000
"""Windows that are summed up in one transaction."""
_REPLACED = ("usd", "zone", "soft")


def put(conn: Connection, budget: Budget, by: Actor) -> int:
    """Store a budget, or replace amount, time zone and soft limit of the one of its id; logged with its author.

    Accounts that have spent enough for its soft limit already are warned of at once; returns how many they are.
    """
    fields = asdict(budget)
    fresh = insert_into(conn, BUDGETS).values(fields | {"id": budget.id}).on_conflict_do_nothing()
    if conn.execute(fresh).rowcount == 1:
        note(conn, by, "budget.set", budget.id, tenant=budget.tenant, before=None, after=fields)
        return _warn_of_present_windows(conn, budget)
    before = _locked(conn, budget.id)
    replaced = {name: fields[name] for name in _REPLACED}
    conn.execute(update(BUDGETS).where(BUDGETS.c.id == budget.id).values(replaced))
    note(conn, by, "budget.set", budget.id, tenant=budget.tenant, before=before, after=(before or {}) | replaced)
    return _warn_of_present_windows(conn, budget)


def _warn_of_present_windows(conn: Connection, budget: Budget) -> int:
    """Warn of each account that has reached the soft limit in its present window without a warning so far.

    The rows are locked in the order in which entries lock them.
    """
    if budget.soft is None:
        return 0
    now, row = runs.clock(conn), BUDGET_WINDOWS.c
    reached = (row.budget == budget.id, row.end > now, row.warned_at.is_(None), row.spent >= budget.soft * budget.usd)
    query = select(row.account, row.start, row.end, row.spent).where(*reached).order_by(row.account, row.start)
    found = conn.execute(query.with_for_update()).all()
    for account, start, end, spent in found:
        warn(conn, budget, account, Window(start, end), spent, now)
        mine = (row.account == account, row.start == start)
        conn.execute(update(BUDGET_WINDOWS).where(*mine).values(warned_at=now))
    return len(found)


def warn(conn: Connection, budget: Budget, account: str, of: Window, spent: int, now: float) -> None:
    """Queue the notice that a window of an account has reached its budget's soft limit."""
    about = notices.soft_limit(budget, account, of, spent)
    values = {"run": account, "turn": of.start, "word": notices.SOFT_LIMIT, "about": about}
    conn.execute(NOTICES.insert().values(**values, at=now, tries=0, due=now))


def remove(conn: Connection, id_: str, by: Actor) -> bool:
    """Delete a budget, and log it with its author. False if there is none of this id."""
    before = _locked(conn, id_)
    if before is None:
        return False
    conn.execute(delete(BUDGETS).where(BUDGETS.c.id == id_))
    note(conn, by, "budget.removed", id_, tenant=before["tenant"], before=before, after=None)
    return True


def _locked(conn: Connection, id_: str) -> dict[str, Any] | None:
    """The fields of a budget whose row is locked; None if there is none."""
    row = conn.execute(select(*_COLUMNS).where(BUDGETS.c.id == id_).with_for_update()).one_or_none()
    if not row:
        return None
    return asdict(Budget(**row._mapping))


def page(conn: Connection, tenant: str | None, after: str | None, limit: int | None) -> tuple[Budget, ...]:
    """The budgets of one tenant, or of all, in the order of their ids, from the one that follows `after`."""
    query = select(*_COLUMNS).order_by(BUDGETS.c.id).limit(limit)
    if tenant is not None:
        query = query.where(BUDGETS.c.tenant == tenant)
    if after is not None:
        query = query.where(BUDGETS.c.id > after)
    return tuple([Budget(**row._mapping) for row in conn.execute(query)])


def named(conn: Connection, ids: Sequence[str]) -> tuple[Budget, ...]:
    """The budgets that exist of these ids."""
    return tuple([Budget(**row._mapping) for row in conn.execute(select(*_COLUMNS).where(BUDGETS.c.id.in_(ids)))])


def standing(
    conn: Connection, ids: Sequence[str], accounts: Sequence[str]
) -> tuple[float, Mapping[str, Budget], Mapping[str, int]]:
    """The database's time, the budgets that exist of these ids, and the start of the latest window of each of these
    accounts that has one: all in one statement. The time is 0 if there is no budget."""
    row = BUDGET_WINDOWS.c
    windows = select(row.budget, row.account, func.max(row.start).label("latest")).where(row.account.in_(accounts))
    newest = windows.group_by(row.budget, row.account).subquery()
    now: ColumnElement[float] = literal_column(runs.clock_of(conn))
    query = select(now, newest.c.account, newest.c.latest, *_COLUMNS)
    query = query.select_from(BUDGETS.outerjoin(newest, newest.c.budget == BUDGETS.c.id))
    time, known, latest = 0.0, dict[str, Budget](), dict[str, int]()
    for at, account, start, *fields in conn.execute(query.where(BUDGETS.c.id.in_(ids))):
        budget = Budget(*fields)
        time, known[budget.id] = float(at), budget
        if account is not None:
            latest[account] = start
    return time, known, latest


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
    columns = [row[name] for name in BudgetUse.__dataclass_fields__]
    query = select(*columns).where(row.budget == id_, row.start > EARLIER)
    if account is not None:
        query = query.where(row.account == account)
    query = query.order_by(row.start.desc(), (row.spent + row.held).desc(), row.account).limit(limit)
    return tuple([BudgetUse(*found) for found in conn.execute(query)])


def sum_up(conn: Connection, before: float) -> int:
    """Add the windows that ended before this time, and of which nothing is held, to one row for each account, which
    starts at `EARLIER`. At most `AT_ONCE` windows; returns how many."""
    row = BUDGET_WINDOWS.c
    over = (row.start > EARLIER, row.end < int(before), row.held == 0)
    found = select(row.account, row.start, row.budget, row.spent, row.overrun).where(*over).limit(AT_ONCE)
    gone = conn.execute(found.order_by(row.account, row.start).with_for_update(skip_locked=True)).all()
    if not gone:
        return 0
    sums: dict[str, dict[str, Any]] = {}
    for one in gone:
        new = {"account": one.account, "start": EARLIER, "budget": one.budget, "end": EARLIER, "held": 0}
        total = sums.setdefault(one.account, new | {"spent": 0, "overrun": 0})
        total["spent"] += one.spent
        total["overrun"] += one.overrun
    conn.execute(delete(BUDGET_WINDOWS).where(tuple_(row.account, row.start).in_([(one[0], one[1]) for one in gone])))
    made = insert_into(conn, BUDGET_WINDOWS).values(list(sums.values()))
    added = {name: row[name] + made.excluded[name] for name in ("spent", "overrun")}
    conn.execute(made.on_conflict_do_update(index_elements=[row.account, row.start], set_=added))
    return len(gone)


_COLUMNS = tuple([BUDGETS.c[name] for name in Budget.__dataclass_fields__])
