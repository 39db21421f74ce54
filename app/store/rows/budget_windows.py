"""The windows of budgets' accounts: their rows, and the slices of the accounts that many processes change (D7).

A window is one row, which is locked from the check of a hold until the commit. Where a budget says so (`slices`), its
account has further rows, the slices, each with an amount in escrow. That amount counts as held in the account's own
row. A slice holds and spends within it, so that a call locks the row of one slice alone, and processes that use several
slices do not wait for each other. What the account has spent and holds is the sum over its rows, without the escrow.

Whatever needs the sum locks all rows of the window, in the order of their keys as everybody does, brings the slices
home, and divides anew what is free.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from msgspec import Struct
from sqlalchemy import ColumnElement, Connection, bindparam, collate, select, tuple_, update

from app.core.pool.budgets import MOST_SLICES, SLICE, account_of_slice, budget_id, slice_of
from app.store.sqlkit.statements import WINDOW_AMOUNTS
from app.store.sqlkit.tables import BUDGET_WINDOWS, insert_into

Place = tuple[str, int]
"""The account, or the slice of one, and the start of a window."""


class WindowRow(Struct):
    """A window's row while it is locked."""

    account: str
    start: int
    budget: str
    end: int
    held: int
    spent: int
    overrun: int
    warned_at: float | None
    escrow: int
    whole: str | None

    @property
    def free(self) -> int:
        """Return what a slice may still hold."""
        return self.escrow - self.spent - self.held


AT_ONCE = 250
"""Windows of accounts whose slices one statement looks for, and rows that one statement makes or locks. A statement of
Postgres has at most 32,767 parameters, and one of these windows may have `MOST_SLICES`, one of these rows ten."""
_COLUMNS = tuple([BUDGET_WINDOWS.c[name] for name in WindowRow.__struct_fields__])
_INITIAL_AMOUNTS = {"held": 0, "spent": 0, "overrun": 0, "warned_at": None, "escrow": 0}


def lock(conn: Connection, places: Collection[Place], ends: Mapping[Place, int]) -> list[WindowRow]:
    """Return the rows of these windows, locked in the order of their keys; those that are missing are made."""
    values = []
    for account, start in sorted(places):
        whole = account_of_slice(account) if SLICE in account else None
        end = ends.get((account, start), start)
        place = {"account": account, "start": start, "budget": budget_id(account), "end": end, "whole": whole}
        values.append(place | _INITIAL_AMOUNTS)
    row = BUDGET_WINDOWS.c
    rows: list[WindowRow] = []
    for first in range(0, len(values), AT_ONCE):
        insertion = insert_into(conn, BUDGET_WINDOWS).values(values[first : first + AT_ONCE])
        upsert = insertion.on_conflict_do_update(index_elements=[row.account, row.start], set_={"held": row.held})
        rows += [WindowRow(*columns) for columns in conn.execute(upsert.returning(*_COLUMNS))]
    return rows


_MINE = (BUDGET_WINDOWS.c.account == bindparam("its_account"), BUDGET_WINDOWS.c.start == bindparam("its_start"))
_CHANGE = update(BUDGET_WINDOWS).where(*_MINE).values({name: bindparam(name) for name in WINDOW_AMOUNTS})


def write(conn: Connection, rows: Sequence[WindowRow]) -> None:
    """Write the amounts of rows that are locked."""
    if rows:
        conn.execute(_CHANGE, [_amounts(row) for row in rows])


def _amounts(row: WindowRow) -> dict[str, Any]:
    """Return the values of `_CHANGE` for a row. No other column's, which SQLAlchemy would write as well."""
    return {"its_account": row.account, "its_start": row.start} | {name: getattr(row, name) for name in WINDOW_AMOUNTS}


def slices_of(conn: Connection, places: Collection[Place]) -> list[Place]:
    """Return the slices that these windows of accounts have. No lock is taken."""
    row = BUDGET_WINDOWS.c
    slices: list[Place] = []
    in_order = sorted(places)
    for first in range(0, len(in_order), AT_ONCE):
        some_places = set(in_order[first : first + AT_ONCE])
        names: list[str] = []
        for account in {account for account, _ in some_places}:
            names += [slice_of(account, number) for number in range(MOST_SLICES)]
        starts = {start for _, start in some_places}
        query = select(row.account, row.start).where(row.account.in_(names), row.start.in_(starts))
        for name, start in conn.execute(query):
            if (account_of_slice(name), start) in some_places:
                slices.append((name, start))
    return slices


def bring_home(own: WindowRow, slices: Collection[WindowRow]) -> None:
    """Move what the slices of a window have spent, and all that is free in them, to the account's own row. Each keeps
    in escrow what its calls hold."""
    for part in slices:
        own.spent += part.spent
        own.overrun += part.overrun
        own.held += part.held - part.escrow
        own.escrow += part.held - part.escrow
        part.spent, part.overrun, part.escrow = 0, 0, part.held


def divide(own: WindowRow, slices: Collection[WindowRow], usd: int) -> None:
    """Put up to half of an amount that is free in escrow: as much for each of the slices."""
    share = max(usd, 0) // (2 * max(len(slices), 1))
    for part in slices:
        part.escrow += share
        own.held += share
        own.escrow += share


def bring_all_home(conn: Connection, *conditions: ColumnElement[bool]) -> None:
    """Bring the slices home in each of the chosen windows that has something in escrow.

    The rows are changed and not made, which is all that a caller's role may do (see `sqlkit/row_security.py`).
    """
    row = BUDGET_WINDOWS.c
    query = select(row.account, row.start).where(row.whole.is_(None), row.escrow > 0, *conditions)
    places = {(account, start) for account, start in conn.execute(query)}
    if not places:
        return
    places |= set(slices_of(conn, places))
    account: ColumnElement[str] = row.account
    if conn.dialect.name == "postgresql":
        account = collate(row.account, "C")
    in_order = sorted(places)
    rows: list[WindowRow] = []
    for first in range(0, len(in_order), AT_ONCE):
        some_rows = select(*_COLUMNS).where(tuple_(row.account, row.start).in_(in_order[first : first + AT_ONCE]))
        present = some_rows.order_by(account, row.start).with_for_update()
        rows += [WindowRow(*columns) for columns in conn.execute(present)]
    slices = windows(rows)
    for own in rows:
        if own.whole is None:
            bring_home(own, slices[own.account, own.start])
    write(conn, rows)


def windows(rows: Collection[WindowRow]) -> dict[Place, list[WindowRow]]:
    """Return the slices among these rows, by the window of their account; an empty list for a window without any."""
    slices: dict[Place, list[WindowRow]] = {}
    for row in rows:
        slices_of_window = slices.setdefault((row.whole or row.account, row.start), [])
        if row.whole is not None:
            slices_of_window.append(row)
    return slices
