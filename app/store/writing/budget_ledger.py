"""The accounts of budgets in which a batch of entries reserves and settles, in the transaction of the batch (D7).

A run's row names its accounts. Each intent of the run reserves its hold in the present window of all of them, or the
entry is refused with `BudgetExhausted` and changes nothing. Each outcome settles the hold of its call, in the window in
which it was made. The rows of windows are locked in the order of their keys, after those of runs and claims, so that no
two batches wait for each other in a circle.

Windows follow the database's clock, whatever the clocks of processes say. They never go back: while that clock says a
time before the latest window of an account, that window goes on.

A run whose budget has slices reserves in the slice of this process (see `rows/budget_windows.py`). What one slice alone
cannot decide is refused with `NeedsAllSlices`, and tried again with all rows of the windows locked.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import ceil

import orjson
from sqlalchemy import Connection, delete, tuple_

from app.core.pool.budgets import Budget, Window, budget_id, slice_of, whole_account, window
from app.core.records import record
from app.core.run.events import CallFinished, CallIntended
from app.errors import BudgetExhausted
from app.store.protocol import Entry
from app.store.rows import budget_windows
from app.store.rows import budgets as budget_rows
from app.store.rows.budget_windows import Place, WindowRow
from app.store.sqlkit.statements import Row, Rows, Statements
from app.store.sqlkit.tables import BUDGET_HOLDS


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


class NeedsAllSlices(Exception):
    """An entry that can only be decided with all slices of its accounts: one of them has not enough left by itself, or
    its outcome may reach the soft limit, or is an overrun, which counts against the whole account."""


class BudgetLedger:
    """The windows and holds of a batch."""

    def __init__(
        self,
        now: float,
        known: Mapping[str, Budget],
        windows: Iterable[WindowRow],
        present: Mapping[str, Place],
        holds: Mapping[tuple[str, str], tuple[_Hold, ...]],
        *,
        has_all_slices: bool = False,
    ) -> None:
        """`known` are the budgets by id, `present` the rows in which each account is held now, and `holds` those of
        the calls that the batch settles, by run and call, whose rows were deleted. `now` is the database's time. If it
        has all slices, these are among the `windows`, and the amounts of budgets are locked."""
        self._now = now
        self._known = known
        self._windows = {(window.account, window.start): window for window in windows}
        self._slices = budget_windows.windows(self._windows.values())
        self._has_all_slices = has_all_slices
        self._present = present
        self._holds = dict(holds)
        self._changed: set[Place] = set()
        self.signals: list[Signal] = []

    def charge(self, entry: Entry, accounts: Sequence[str]) -> Charge:
        """The changes of an entry of a run with these accounts. Raises `BudgetExhausted` if one has not enough left, or
        `NeedsAllSlices`."""
        held: dict[Place, int] = {}
        spent: dict[Place, int] = {}
        overrun: dict[Place, int] = {}
        begun: dict[tuple[str, str], tuple[_Hold, ...]] = {}
        ended: list[tuple[str, str]] = []
        for fact in entry.events:
            if isinstance(fact, CallFinished):
                call = (entry.run, fact.call)
                for hold in self._holds.get(call, ()):
                    self._check_outcome(hold, fact.usd)
                    _add(held, hold.place, -hold.usd)
                    _add(spent, hold.place, fact.usd)
                    _add(overrun, hold.place, max(fact.usd - hold.usd, 0))
                ended.append(call)
            elif isinstance(fact, CallIntended) and fact.usd_held:
                holds = []
                for account in accounts:
                    if account in self._present:
                        holds.append(_Hold(self._present[account], fact.usd_held))
                for hold in holds:
                    _add(held, hold.place, hold.usd)
                begun[entry.run, fact.call] = tuple(holds)
        if begun:
            self._check(held, spent, list(chain.from_iterable(begun.values())))
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
            left = self._left(row, held, spent)
            if left < 0 and not self._has_all_slices and (row.whole is not None or row.escrow):
                raise NeedsAllSlices
            if left < 0:
                refusals.append(BudgetExhausted(row.budget, row.end, left=left + wanted[place]))
        if refusals:
            raise min(refusals, key=lambda refusal: refusal.left)

    def _left(self, row: WindowRow, held: Mapping[Place, int], spent: Mapping[Place, int]) -> int:
        """Return what a slice has left after these changes, or, with all slices, what its account has."""
        if row.whole is not None and not self._has_all_slices:
            place = row.account, row.start
            return row.free - held.get(place, 0) - spent.get(place, 0)
        own = row.whole or row.account, row.start
        rows = [self._windows[own], *self._slices[own]]
        used = 0
        for open_window in rows:
            place = open_window.account, open_window.start
            used += open_window.spent + open_window.held + held.get(place, 0) + spent.get(place, 0)
            if open_window.whole is not None:
                used -= open_window.escrow  # it is held in the account's own row
        return self._known[row.budget].usd - used

    def _check_outcome(self, hold: _Hold, usd: int) -> None:
        """Raise `NeedsAllSlices` if the account may reach its soft limit, or is overrun, by the outcome of a call.

        While a limit is not reached, no more is put in escrow than could be spent below it. So a slice that has nothing
        free may be one whose outcomes reach it.
        """
        row = self._windows[hold.place]
        budget = self._known.get(row.budget)
        if self._has_all_slices or row.whole is None or budget is None:
            return
        if usd > hold.usd or (budget.soft is not None and row.free <= 0):
            raise NeedsAllSlices

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

    def writes(self, conn: Connection, statements: Statements) -> Sequence[tuple[Rows, Sequence[Row]]]:
        """Return all changes, and the holds that are left: those that begin, and those whose outcome was refused.

        Warnings that are due are given with it.
        """
        if self._has_all_slices:
            self._bring_home()
        changed = [self._windows[place] for place in sorted(self._changed)]
        for row in changed:
            self._warn(conn, row)
        if self._has_all_slices:
            self._divide()
        hold_rows = []
        for (run, call), holds in self._holds.items():
            for hold in holds:
                hold_rows.append((run, call, *hold.place, hold.usd))
        amounts = []
        for row in changed:
            amounts.append((row.held, row.spent, row.overrun, row.warned_at, row.escrow, row.account, row.start))
        return [(statements.update_window, amounts), (statements.insert_hold, hold_rows)]

    def _bring_home(self) -> None:
        """Add up in the account's own row what its slices have spent, and all that is free in them."""
        for own, slices in self._slices.items():
            if slices:
                budget_windows.bring_home(self._windows[own], slices)
                self._changed |= {own, *[(part.account, part.start) for part in slices]}

    def _divide(self) -> None:
        """Put in escrow again what is free of the accounts in which the batch holds something."""
        for account, (_, start) in self._present.items():
            own, slices = self._windows[account, start], self._slices[account, start]
            budget = self._known[own.budget]
            limit = budget.usd
            if budget.soft is not None and own.warned_at is None:
                limit = min(limit, ceil(budget.soft * budget.usd) - 1)
            if budget.slices is not None:
                names = _slice_ids(account, budget.slices)
                present = [part for part in slices if part.account in names]
                budget_windows.divide(own, present, limit - own.spent - own.held)

    def _warn(self, conn: Connection, row: WindowRow) -> None:
        """Give the warning of a window that has reached the soft limit of its budget, once. That of an account with
        slices is given when all of them are at hand."""
        budget = self._known.get(row.budget)
        if budget is None or budget.soft is None or row.whole is not None or row.warned_at is not None:
            return
        if row.spent < budget.soft * budget.usd:
            return
        row.warned_at = self._now
        self.signals.append(Signal("soft_limit", row.budget))
        budget_rows.warn(conn, budget, row.account, Window(row.start, row.end), row.spent, self._now)


def load(
    conn: Connection,
    runs: Mapping[str, str | None],
    batch: Sequence[Entry],
    number: int = 0,
    *,
    all_slices: bool = False,
) -> BudgetLedger | None:
    """Read and lock what a batch needs, given the column `budgets` of its runs; None if no account is concerned. The
    holds that the batch settles are deleted with it, since each statement delays all who wait for the same windows.

    `number` chooses the slice in which new holds are made. With `all_slices` all rows of the accounts are locked, and
    their budgets before them, as whoever changes a budget does.
    """
    settled, accounts = _concerned(runs, batch)
    if not settled and not accounts:
        return None
    holds = _delete_holds(conn, settled)
    places = {hold.place for hold in chain.from_iterable(holds.values())}
    ids = {budget_id(account) for account in accounts}
    ids.update([budget_id(account) for account, _ in places])
    if all_slices:
        budget_rows.lock_amounts(conn, sorted(ids))
    now, known, latest = budget_rows.standing(conn, sorted(ids), accounts)
    present: dict[str, Place] = {}
    ends = {}
    for account in accounts:
        budget = known.get(budget_id(account))
        if budget is None:
            continue
        start = max(window(budget.period, budget.zone, now).start, latest.get(account, 0))
        names = [account]
        if budget.slices is not None:
            names = _slice_ids(account, budget.slices)
        own = names[number % len(names)]
        present[account] = own, start
        needed = {account, *names} if all_slices else {own}
        for name in needed:
            places.add((name, start))
            ends[name, start] = window(budget.period, budget.zone, start).end
    if all_slices:
        whole = {(whole_account(name), start) for name, start in places}
        places |= {*whole, *budget_windows.slices_of(conn, whole)}
    locked = budget_windows.lock(conn, places, ends)
    return BudgetLedger(now, known, locked, present, holds, has_all_slices=all_slices)


def _concerned(runs: Mapping[str, str | None], batch: Sequence[Entry]) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the calls that a batch settles, and the accounts in which it holds something, in order; of runs that have
    accounts."""
    settled: list[tuple[str, str]] = []
    accounts: set[str] = set()
    for entry in batch:
        column = runs.get(entry.run)
        if not column:
            continue
        for fact in entry.events:
            if isinstance(fact, CallFinished):
                settled.append((entry.run, fact.call))
            elif isinstance(fact, CallIntended):
                accounts.update(accounts_of(column))
    return settled, sorted(accounts)


def _slice_ids(account: str, slices: int) -> list[str]:
    """Return the ids of the slices of an account."""
    return [slice_of(account, number) for number in range(slices)]


def column_of(accounts: Sequence[str]) -> str:
    """Return the column of a run's row that names its accounts."""
    return orjson.dumps(accounts).decode()


def accounts_of(column: str | None) -> Sequence[str]:
    """The accounts that a run's row names."""
    found: list[str] = orjson.loads(column) if column else []
    return found


def _delete_holds(conn: Connection, calls: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[_Hold, ...]]:
    """Delete the holds of these calls, and return them. The runs' rows are locked, so that nobody else reads them."""
    row = BUDGET_HOLDS.c
    found: dict[tuple[str, str], tuple[_Hold, ...]] = {}
    if not calls:
        return found
    deletion = delete(BUDGET_HOLDS).where(tuple_(row.run, row.call).in_(list(calls)))
    for run, call, account, start, usd in conn.execute(
        deletion.returning(row.run, row.call, row.account, row.start, row.usd)
    ):
        found[run, call] = (*found.get((run, call), ()), _Hold((account, start), usd))
    return found


def _add(amounts: dict[Place, int], place: Place, usd: int) -> None:
    amounts[place] = amounts.get(place, 0) + usd
