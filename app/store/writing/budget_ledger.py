"""The accounts of budgets in which a batch of entries reserves and settles, in the transaction of the batch (D7).

A run's row names its accounts. Each intent of the run reserves its hold in the present window of all of them, or the
entry is refused with `BudgetExhausted` and changes nothing. Each outcome settles the hold of its call, in the window in
which it was made. The rows of windows are locked in the order of their keys, after those of runs and claims, so that no
two batches wait for each other in a circle.

Windows follow the database's clock, whatever the clocks of processes say. They never go back: while that clock says a
time before the latest window of an account, that window goes on.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import orjson
from sqlalchemy import ColumnElement, Connection, bindparam, delete, tuple_, update

from app.core.pool.budgets import Budget, Window, budget_id, window
from app.core.records import record
from app.core.run.events import CallFinished, CallIntended
from app.errors import BudgetExhausted
from app.store.protocol import Entry
from app.store.rows import budgets as budget_rows
from app.store.sqlkit.tables import BUDGET_HOLDS, BUDGET_WINDOWS, insert_into

Place = tuple[str, int]
"""The account and the start of a window."""
_COLUMNS = ("account", "start", "budget", "end", "held", "spent", "overrun", "warned_at")


@dataclass(slots=True)
class _Window:
    """A window's row while the batch is applied."""

    account: str
    start: int
    budget: str
    end: int
    held: int
    spent: int
    overrun: int
    warned_at: float | None


@record(frozen=True, slots=True)
class _Hold:
    """A hold of one call in one window."""

    place: Place
    usd: int


@record(frozen=True, slots=True)
class Charge:
    """The changes that one entry makes: the amounts by which windows change, and the holds that begin and end."""

    held: Mapping[Place, int]
    spent: Mapping[Place, int]
    overrun: Mapping[Place, int]
    begun: Mapping[tuple[str, str], tuple[_Hold, ...]]
    ended: tuple[tuple[str, str], ...]


@record(frozen=True, slots=True)
class Signal:
    """Something to count once the batch is committed: a soft limit that was reached, or an overrun of `usd`."""

    kind: str
    budget: str
    usd: int = 0


class BudgetLedger:
    """The windows and holds of a batch."""

    def __init__(
        self,
        now: float,
        known: Mapping[str, Budget],
        windows: Iterable[_Window],
        present: Mapping[str, int],
        holds: Mapping[tuple[str, str], tuple[_Hold, ...]],
    ) -> None:
        """`known` are the budgets by id, `present` the starts of the present windows by account, and `holds` those of
        the calls that the batch settles, by run and call, whose rows were deleted. `now` is the database's time."""
        self._now = now
        self._known = known
        self._windows = {(one.account, one.start): one for one in windows}
        self._present = present
        self._holds = dict(holds)
        self._changed: set[Place] = set()
        self.signals: list[Signal] = []

    def charge(self, entry: Entry, accounts: Sequence[str]) -> Charge:
        """The changes of an entry of a run with these accounts. Raises `BudgetExhausted` if one has not enough left."""
        held: dict[Place, int] = {}
        spent: dict[Place, int] = {}
        overrun: dict[Place, int] = {}
        begun: dict[tuple[str, str], tuple[_Hold, ...]] = {}
        ended: list[tuple[str, str]] = []
        for fact in entry.events:
            if isinstance(fact, CallFinished):
                call = (entry.run, fact.call)
                for hold in self._holds.get(call, ()):
                    _add(held, hold.place, -hold.usd)
                    _add(spent, hold.place, fact.usd)
                    _add(overrun, hold.place, max(fact.usd - hold.usd, 0))
                ended.append(call)
            elif isinstance(fact, CallIntended) and fact.usd_held:
                its = [_Hold((name, self._present[name]), fact.usd_held) for name in accounts if name in self._present]
                for hold in its:
                    _add(held, hold.place, hold.usd)
                begun[entry.run, fact.call] = tuple(its)
        if begun:
            self._check(held, spent, [hold for holds in begun.values() for hold in holds])
        return Charge(held, spent, overrun, begun, tuple(ended))

    def _check(self, held: Mapping[Place, int], spent: Mapping[Place, int], begun: Sequence[_Hold]) -> None:
        """Raise `BudgetExhausted` if an account has not enough left for the holds that begin: of those, the one that
        has least."""
        wanted: dict[Place, int] = {}
        for hold in begun:
            _add(wanted, hold.place, hold.usd)
        refusals: list[BudgetExhausted] = []
        for place in sorted(wanted):
            row = self._windows[place]
            budget = self._known[row.budget]
            left = budget.usd - row.spent - spent.get(place, 0) - row.held - held[place]
            if left < 0:
                refusals.append(BudgetExhausted(budget.id, row.end, left=left + wanted[place]))
        if refusals:
            raise min(refusals, key=lambda one: one.left)

    def apply(self, charge: Charge) -> None:
        """Make the changes of an entry that was not refused."""
        for place in {*charge.held, *charge.spent}:
            row = self._windows[place]
            row.held += charge.held.get(place, 0)
            row.spent += charge.spent.get(place, 0)
            row.overrun += charge.overrun.get(place, 0)
            self._changed.add(place)
            if charge.overrun.get(place, 0):
                self.signals.append(Signal("overrun", row.budget, charge.overrun[place]))
        self._holds |= charge.begun
        for call in charge.ended:
            self._holds.pop(call, None)

    def write(self, conn: Connection) -> None:
        """Write all changes, and the holds that are left: those that begin, and those whose outcome was refused. The
        caller commits."""
        changed = [self._windows[place] for place in sorted(self._changed)]
        for row in changed:
            self._warn(conn, row)
        if changed:
            conn.execute(_CHANGE, [_amounts(row) for row in changed])
        rows = [
            {"run": run, "call": call, "account": hold.place[0], "start": hold.place[1], "usd": hold.usd}
            for (run, call), holds in self._holds.items()
            for hold in holds
        ]
        if rows:
            conn.execute(BUDGET_HOLDS.insert(), rows)

    def _warn(self, conn: Connection, row: _Window) -> None:
        """Give the warning of a window that has reached the soft limit of its budget, once."""
        budget = self._known.get(row.budget)
        if budget is None or budget.soft is None or row.warned_at is not None or row.spent < budget.soft * budget.usd:
            return
        row.warned_at = self._now
        self.signals.append(Signal("soft_limit", row.budget))
        budget_rows.warn(conn, budget, row.account, Window(row.start, row.end), row.spent, self._now)


def load(conn: Connection, runs: Mapping[str, str | None], batch: Sequence[Entry]) -> BudgetLedger | None:
    """Read and lock what a batch needs, given the column `budgets` of its runs; None if no account is concerned. The
    holds that the batch settles are deleted with it, since each statement delays all who wait for the same windows."""
    concerned = [entry for entry in batch if runs.get(entry.run)]
    if not concerned:
        return None
    settled = [(entry.run, fact.call) for entry in concerned for fact in entry.events if isinstance(fact, CallFinished)]
    holding = [entry.run for entry in concerned for fact in entry.events if isinstance(fact, CallIntended)]
    if not settled and not holding:
        return None
    holds = _taken(conn, settled)
    accounts = sorted({name for run in holding for name in accounts_of(runs[run])})
    ids = {budget_id(name) for name in accounts}
    ids |= {budget_id(hold.place[0]) for its in holds.values() for hold in its}
    now, known, latest = budget_rows.standing(conn, sorted(ids), accounts)
    present = {}
    for name in accounts:
        if (budget := known.get(budget_id(name))) is not None:
            present[name] = max(window(budget.period, budget.zone, now).start, latest.get(name, 0))
    places = {*present.items(), *(hold.place for its in holds.values() for hold in its)}
    ends = {}
    for name, start in present.items():
        budget = known[budget_id(name)]
        ends[name, start] = window(budget.period, budget.zone, start).end
    return BudgetLedger(now, known, _locked(conn, sorted(places), ends), present, holds)


def column_of(accounts: Sequence[str]) -> str:
    """The column of a run's row that names its accounts."""
    return orjson.dumps(accounts).decode()


def accounts_of(column: str | None) -> Sequence[str]:
    """The accounts that a run's row names."""
    found: list[str] = orjson.loads(column) if column else []
    return found


def _taken(conn: Connection, calls: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[_Hold, ...]]:
    """The holds of these calls, whose rows are deleted: the run's row is locked, so that nobody else reads them."""
    row = BUDGET_HOLDS.c
    found: dict[tuple[str, str], tuple[_Hold, ...]] = {}
    if calls:
        gone = delete(BUDGET_HOLDS).where(_of(calls)).returning(row.run, row.call, row.account, row.start, row.usd)
        for run, call, account, start, usd in conn.execute(gone):
            found[run, call] = (*found.get((run, call), ()), _Hold((account, start), usd))
    return found


_MINE = (BUDGET_WINDOWS.c.account == bindparam("its_account"), BUDGET_WINDOWS.c.start == bindparam("its_start"))
_CHANGE = (
    update(BUDGET_WINDOWS)
    .where(*_MINE)
    .values({name: bindparam(name) for name in ("held", "spent", "overrun", "warned_at")})
)


def _amounts(row: _Window) -> dict[str, Any]:
    """The values of `_CHANGE` for a window. No other column's, which SQLAlchemy would write as well."""
    mine = {"its_account": row.account, "its_start": row.start}
    return mine | {"held": row.held, "spent": row.spent, "overrun": row.overrun, "warned_at": row.warned_at}


def _of(calls: Sequence[tuple[str, str]]) -> ColumnElement[bool]:
    return tuple_(BUDGET_HOLDS.c.run, BUDGET_HOLDS.c.call).in_(list(calls))


def _locked(conn: Connection, places: Sequence[Place], ends: Mapping[Place, int]) -> list[_Window]:
    """The rows of these windows, locked in their order; those that are missing are made."""
    if not places:
        return []
    row = BUDGET_WINDOWS.c
    fresh = {"held": 0, "spent": 0, "overrun": 0, "warned_at": None}
    values = [
        {"account": account, "start": start, "budget": budget_id(account), "end": ends.get((account, start), start)}
        | fresh
        for account, start in places
    ]
    made = insert_into(conn, BUDGET_WINDOWS).values(values)
    kept = made.on_conflict_do_update(index_elements=[row.account, row.start], set_={"held": row.held})
    columns = [row[name] for name in _COLUMNS]
    return [_Window(*found) for found in conn.execute(kept.returning(*columns))]


def _add(amounts: dict[Place, int], place: Place, usd: int) -> None:
    amounts[place] = amounts.get(place, 0) + usd
