"""Rows of budgets, and the windows of their accounts. Entries change the windows (see `writing/budget_ledger.py`)."""

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import asdict
from sqlalchemy import ColumnElement, Connection, and_, case, delete, func, literal_column, or_, select, tuple_, update

from app.core.pool.budgets import EVERYBODY, MOST_SLICES, Budget, Scope, Window, accounts, slice_of
from app.core.run import notices
from app.store.protocol import Actor, BudgetUse
from app.store.rows import runs
from app.store.rows.admin_events import note
from app.store.rows.budget_windows import bring_all_home
from app.store.sqlkit.tables import BUDGET_WINDOWS, BUDGETS, NOTICES, insert_into

EARLIER = 0
"""The start of the row into which an account's old windows are summed up, so that the account's sums stay."""
AT_ONCE = 2_000
"""Windows that are summed up in one transaction. Each may be of another account, whose sum takes seven parameters of
the one statement that writes all sums; a statement of Postgres has at most 32,767."""
_REPLACED = ("usd", "zone", "soft", "slices")


def put(conn: Connection, budget: Budget, by: Actor) -> int:
    """Store a budget, or replace amount, time zone, soft limit and slices of the one of its id; logged with its author.

    Accounts that have spent enough for its soft limit already are warned of at once; returns how many they are.
    """
    fields = asdict(budget)
    insertion = insert_into(conn, BUDGETS).values(fields | {"id": budget.id}).on_conflict_do_nothing()
    before = _lock_budget(conn, budget.id)
    if before is None and conn.execute(insertion).rowcount != 1:  # somebody has set it just now
        before = _lock_budget(conn, budget.id)
    if before is not None:
        changes = {name: fields[name] for name in _REPLACED}
        conn.execute(update(BUDGETS).where(BUDGETS.c.id == budget.id).values(changes))
        fields = before | changes
    note(conn, by, "budget.set", budget.id, tenant=budget.tenant, before=before, after=_logged_fields(fields))
    return _warn_of_present_windows(conn, budget)


def _warn_of_present_windows(conn: Connection, budget: Budget) -> int:
    """Warn of each account that has reached the soft limit in its present window without a warning so far.

    What its slices have is brought home first: it was divided by the amount and the limit of before. The rows are
    locked in the order in which entries lock them.
    """
    now, row = runs.clock(conn), BUDGET_WINDOWS.c
    bring_all_home(conn, row.budget == budget.id, row.end > now)
    if budget.soft is None:
        return 0
    is_present = (row.budget == budget.id, row.end > now, row.whole.is_(None))
    needs_warning = (*is_present, row.warned_at.is_(None), row.spent >= budget.soft * budget.usd)
    query = select(row.account, row.start, row.end, row.spent).where(*needs_warning).order_by(row.account, row.start)
    rows = conn.execute(query.with_for_update()).all()
    for account, start, end, spent in rows:
        warn(conn, budget, account, Window(start, end), spent, now)
        mine = (row.account == account, row.start == start)
        conn.execute(update(BUDGET_WINDOWS).where(*mine).values(warned_at=now))
    return len(rows)


def warn(conn: Connection, budget: Budget, account: str, of: Window, spent: int, now: float) -> None:
    """Queue the notice that a window of an account has reached its budget's soft limit."""
    about = notices.soft_limit_data(budget, account, of, spent)
    values = {"run": account, "turn": of.start, "word": notices.SOFT_LIMIT, "about": about}
    conn.execute(NOTICES.insert().values(**values, at=now, tries=0, due=now))


def remove(conn: Connection, id_: str, by: Actor) -> bool:
    """Delete a budget, and log it with its author. False if there is none of this id."""
    before = _lock_budget(conn, id_)
    if before is None:
        return False
    conn.execute(delete(BUDGETS).where(BUDGETS.c.id == id_))
    note(conn, by, "budget.removed", id_, tenant=before["tenant"], before=before, after=None)
    return True


def _lock_budget(conn: Connection, id_: str) -> dict[str, Any] | None:
    """Return the fields of a budget whose row is locked; None if there is none."""
    row = conn.execute(select(*_COLUMNS).where(BUDGETS.c.id == id_).with_for_update()).one_or_none()
    if not row:
        return None
    return _logged_fields(asdict(Budget(**row._mapping)))


def _logged_fields(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a budget as they are logged: `slices` only if it has any, as releases without them do."""
    return {name: value for name, value in fields.items() if name != "slices" or value is not None}


def lock_amounts(conn: Connection, ids: Sequence[str]) -> None:
    """Have nobody change these budgets until the transaction ends."""
    conn.execute(select(BUDGETS.c.id).where(BUDGETS.c.id.in_(ids)).order_by(BUDGETS.c.id).with_for_update(read=True))


def page(conn: Connection, tenant: str | None, after: str | None, limit: int | None) -> tuple[Budget, ...]:
    """Return the budgets of one tenant, or of all, in the order of their ids, from the one that follows `after`."""
    query = select(*_COLUMNS).order_by(BUDGETS.c.id).limit(limit)
    if tenant is not None:
        query = query.where(BUDGETS.c.tenant == tenant)
    if after is not None:
        query = query.where(BUDGETS.c.id > after)
    return tuple([Budget(**row._mapping) for row in conn.execute(query)])


def of_ids(conn: Connection, ids: Sequence[str]) -> tuple[Budget, ...]:
    """Return the budgets that exist of these ids."""
    return tuple([Budget(**row._mapping) for row in conn.execute(select(*_COLUMNS).where(BUDGETS.c.id.in_(ids)))])


def budgets_and_windows(
    conn: Connection, ids: Sequence[str], accounts: Sequence[str]
) -> tuple[float, Mapping[str, Budget], Mapping[str, Window]]:
    """Return the database's time, the budgets that exist of these ids, and the latest window of each of these accounts
    that has one: all in one statement. The time is 0 if there is no budget."""
    row = BUDGET_WINDOWS.c
    bounds = (func.max(row.start).label("latest"), func.max(row.end).label("until"))
    windows = select(row.budget, row.account, *bounds).where(row.account.in_(accounts))
    newest = windows.group_by(row.budget, row.account).subquery()
    now: ColumnElement[float] = literal_column(runs.clock_of(conn))
    query = select(now, newest.c.account, newest.c.latest, newest.c.until, *_COLUMNS)
    query = query.select_from(BUDGETS.outerjoin(newest, newest.c.budget == BUDGETS.c.id))
    time, budgets, latest = 0.0, dict[str, Budget](), dict[str, Window]()
    for at, account, start, end, *fields in conn.execute(query.where(BUDGETS.c.id.in_(ids))):
        budget = Budget(*fields)
        time, budgets[budget.id] = float(at), budget
        if account is not None:
            latest[account] = Window(start, end)
    return time, budgets, latest


def tenants(conn: Connection) -> frozenset[str]:
    """Return the tenants that have budgets."""
    return frozenset(conn.execute(select(BUDGETS.c.tenant).distinct()).scalars())


def accounts_of(conn: Connection, tenant: str, names: Mapping[Scope, str]) -> tuple[str, ...]:
    """Return the accounts of a request with these names."""
    budget = BUDGETS.c
    is_concerned = [budget.scope == "tenant"]
    for scope, name in names.items():
        is_concerned.append(and_(budget.scope == scope, budget.name.in_((name, EVERYBODY))))
    query = select(*_COLUMNS).where(budget.tenant == tenant, or_(*is_concerned))
    return accounts([Budget(**row._mapping) for row in conn.execute(query)], names)


def use(conn: Connection, id_: str, limit: int, account: str | None) -> tuple[BudgetUse, ...]:
    """Return windows of a budget, the newest first and the highest of those first.

    Slices are added to their accounts. All rows of a window are summed up at once: a search for the slices of each
    account reads those of all others.
    """
    row = BUDGET_WINDOWS.c
    chosen = [row.budget == id_, row.start > EARLIER]
    if account is not None:
        slices = [slice_of(account, number) for number in range(MOST_SLICES)]
        chosen.append(row.account.in_([account, *slices]))
    newest = select(row.start).where(*chosen, row.whole.is_(None)).order_by(row.start.desc())
    last_start = conn.execute(newest.offset(limit - 1).limit(1)).scalar_one_or_none()
    if last_start is not None:
        chosen.append(row.start >= last_start)
    owner = func.coalesce(row.whole, row.account)
    escrow = func.sum(case((row.whole.is_(None), row.escrow), else_=0))
    held_sum, spent_sum = func.sum(row.held) - escrow, func.sum(row.spent)
    columns = (owner, row.start, func.max(row.end), held_sum, spent_sum, func.sum(row.overrun), func.max(row.warned_at))
    query = select(*columns).where(*chosen).group_by(owner, row.start)
    query = query.order_by(row.start.desc(), (spent_sum + held_sum).desc(), owner).limit(limit)
    uses = []
    for of, start, end, held_now, spent_now, overrun, warned_at in conn.execute(query):
        uses.append(BudgetUse(of, start, end, int(held_now), int(spent_now), int(overrun), warned_at))
    return tuple(uses)


def sum_up(conn: Connection, before: float) -> int:
    """Add the windows that ended before this time, and of which nothing is held, to one row for each account, which
    starts at `EARLIER`. At most `AT_ONCE` rows; returns how many."""
    row = BUDGET_WINDOWS.c
    over = (row.start > EARLIER, row.end < int(before))
    bring_all_home(conn, *over)
    is_done = (*over, row.held == 0)
    columns = (row.account, row.start, row.budget, row.spent, row.overrun, row.whole)
    query = select(*columns).where(*is_done).limit(AT_ONCE)
    windows = conn.execute(query.order_by(row.account, row.start).with_for_update(skip_locked=True)).all()
    if not windows:
        return 0
    sums: dict[str, dict[str, Any]] = {}
    for account_row in windows:
        account = account_row.whole or account_row.account
        empty = {"account": account, "start": EARLIER, "budget": account_row.budget, "end": EARLIER, "held": 0}
        total = sums.setdefault(account, empty | {"spent": 0, "overrun": 0})
        total["spent"] += account_row.spent
        total["overrun"] += account_row.overrun
    places = [(window.account, window.start) for window in windows]
    conn.execute(delete(BUDGET_WINDOWS).where(tuple_(row.account, row.start).in_(places)))
    insertion = insert_into(conn, BUDGET_WINDOWS).values(list(sums.values()))
    increments = {name: row[name] + insertion.excluded[name] for name in ("spent", "overrun")}
    conn.execute(insertion.on_conflict_do_update(index_elements=[row.account, row.start], set_=increments))
    return len(windows)


_COLUMNS = tuple([BUDGETS.c[name] for name in Budget.__struct_fields__])
