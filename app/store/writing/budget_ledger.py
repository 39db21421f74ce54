"""The accounts of budgets in which a batch of entries reserves and settles, in the transaction of the batch (D7).

A run's row names its accounts. Each intent of the run reserves its hold in the present window of all of them, or the
entry is refused with `BudgetExhausted` and changes nothing. Each outcome settles the hold of its call, in the window in
which it was made. The rows of windows are locked in the order of their keys, after those of runs and claims, so that no
two batches wait for each other in a circle.

Windows follow the database's clock, whatever the clocks of processes say. They never go back: while that clock says a
time before the end of the latest window of an account, that window goes on. So a new time zone of a budget counts from
the window after the one in which it was set, and gives nobody the same hours twice.

A run whose budget has slices reserves in the slice of this process (see `rows/budget_windows.py`). What one slice alone
cannot decide is refused with `NeedsAllSlices`, and tried again with all rows of the windows locked.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from math import ceil

import orjson
from msgspec import Struct
from sqlalchemy import Connection, delete, tuple_

from app.core.pool.budgets import Budget, Window, account_of_slice, budget_id, slice_of, window
from app.core.run.events import CallFinished, CallIntended
from app.errors import BudgetExhausted
from app.store.protocol import Entry
from app.store.rows import budget_windows
from app.store.rows import budgets as budget_rows
from app.store.rows.budget_windows import Place, WindowRow
from app.store.sqlkit.statements import Row, Statements, TableWrite
from app.store.sqlkit.tables import BUDGET_HOLDS


class _Hold(Struct, frozen=True):
    """A hold of one call in one window."""

    place: Place
    usd: int


class Charge(Struct, frozen=True):
    """The changes that one entry makes: the amounts by which windows change, and the holds that begin and end."""

    held_usd: Mapping[Place, int]
    spent_usd: Mapping[Place, int]
    overrun_usd: Mapping[Place, int]
    new_holds: Mapping[tuple[str, str], tuple[_Hold, ...]]
    settled_calls: tuple[tuple[str, str], ...]


class Signal(Struct, frozen=True):
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
        budgets: Mapping[str, Budget],
        windows: Iterable[WindowRow],
        current_places: Mapping[str, Place],
        holds: Mapping[tuple[str, str], tuple[_Hold, ...]],
        *,
        has_all_slices: bool = False,
    ) -> None:
        """`budgets` are the budgets by id, and `current_places` the rows in which new holds of each account are made.
        `holds` are those of the calls that the batch settles, by run and call; their rows were deleted. `now` is the
        database's time. If the ledger has all slices, these are among the `windows`, and the amounts of budgets are
        locked."""
        self._now = now
        self._budgets = budgets
        self._windows = {(window.account, window.start): window for window in windows}
        self._slices = budget_windows.windows(self._windows.values())
        self._has_all_slices = has_all_slices
        self._current_places = current_places
        self._holds = dict(holds)
        self._changed: set[Place] = set()
        self.signals: list[Signal] = []

    def charge(self, entry: Entry, accounts: Sequence[str]) -> Charge:
        """Return the changes of an entry of a run with these accounts. Raises `BudgetExhausted` if one has not enough
        left, or `NeedsAllSlices`."""
        held_usd: dict[Place, int] = {}
        spent_usd: dict[Place, int] = {}
        overrun_usd: dict[Place, int] = {}
        new_holds: dict[tuple[str, str], tuple[_Hold, ...]] = {}
        settled_calls: list[tuple[str, str]] = []
        for fact in entry.events:
            if isinstance(fact, CallFinished):
                call = (entry.run, fact.call)
                for hold in self._holds.get(call, ()):
                    self._check_outcome(hold, fact.usd)
                    _add(held_usd, hold.place, -hold.usd)
                    _add(spent_usd, hold.place, fact.usd)
                    _add(overrun_usd, hold.place, max(fact.usd - hold.usd, 0))
                settled_calls.append(call)
            elif isinstance(fact, CallIntended) and fact.usd_held:
                holds = []
                for account in accounts:
                    if account in self._current_places:
                        holds.append(_Hold(self._current_places[account], fact.usd_held))
                for hold in holds:
                    _add(held_usd, hold.place, hold.usd)
                new_holds[entry.run, fact.call] = tuple(holds)
        if new_holds:
            self._check(held_usd, spent_usd, list(chain.from_iterable(new_holds.values())))
        return Charge(held_usd, spent_usd, overrun_usd, new_holds, tuple(settled_calls))

    def _check(self, held_usd: Mapping[Place, int], spent_usd: Mapping[Place, int], new_holds: Sequence[_Hold]) -> None:
        """Raise `BudgetExhausted` if an account has not enough left for the holds that begin: of those, the one that
        has least."""
        needed_usd: dict[Place, int] = {}
        for hold in new_holds:
            _add(needed_usd, hold.place, hold.usd)
        refusals: list[BudgetExhausted] = []
        for place in sorted(needed_usd):
            row = self._windows[place]
            remaining_usd = self._remaining(row, held_usd, spent_usd)
            if remaining_usd < 0 and not self._has_all_slices and (row.whole is not None or row.escrow):
                raise NeedsAllSlices
            if remaining_usd < 0:
                refusals.append(BudgetExhausted(row.budget, row.end, left=remaining_usd + needed_usd[place]))
        if refusals:
            raise min(refusals, key=lambda refusal: refusal.left)

    def _remaining(self, row: WindowRow, held_usd: Mapping[Place, int], spent_usd: Mapping[Place, int]) -> int:
        """Return what a slice has left after these changes, or, with all slices, what its account has."""
        if row.whole is not None and not self._has_all_slices:
            place = row.account, row.start
            return row.free - held_usd.get(place, 0) - spent_usd.get(place, 0)
        own = row.whole or row.account, row.start
        rows = [self._windows[own], *self._slices[own]]
        used_usd = 0
        for open_window in rows:
            place = open_window.account, open_window.start
            used_usd += open_window.spent + open_window.held + held_usd.get(place, 0) + spent_usd.get(place, 0)
            if open_window.whole is not None:
                used_usd -= open_window.escrow  # it is held in the account's own row
        return self._budgets[row.budget].usd - used_usd

    def _check_outcome(self, hold: _Hold, usd: int) -> None:
        """Raise `NeedsAllSlices` if the account may reach its soft limit, or is overrun, by the outcome of a call.

        While a limit is not reached, no more is put in escrow than could be spent below it. So a slice that has nothing
        free may be one whose outcomes reach it.
        """
        row = self._windows[hold.place]
        budget = self._budgets.get(row.budget)
        if self._has_all_slices or row.whole is None or budget is None:
            return
        if usd > hold.usd or (budget.soft is not None and row.free <= 0):
            raise NeedsAllSlices

    def apply(self, charge: Charge) -> None:
        """Make the changes of an entry that was not refused."""
        for place in {*charge.held_usd, *charge.spent_usd}:
            row = self._windows[place]
            row.held += charge.held_usd.get(place, 0)
            row.spent += charge.spent_usd.get(place, 0)
            row.overrun += charge.overrun_usd.get(place, 0)
            self._changed.add(place)
            if charge.overrun_usd.get(place, 0):
                self.signals.append(Signal("overrun", row.budget, charge.overrun_usd[place]))
        self._holds |= charge.new_holds
        for call in charge.settled_calls:
            self._holds.pop(call, None)

    def writes(self, conn: Connection, statements: Statements) -> Sequence[tuple[TableWrite, Sequence[Row]]]:
        """Return all changes, and the holds that are left: those that begin, and those whose outcome was refused.

        Warnings that are due are given with it.
        """
        if self._has_all_slices:
            self._bring_home()
        rows = [self._windows[place] for place in sorted(self._changed)]
        for row in rows:
            self._warn(conn, row)
        if self._has_all_slices:
            self._divide()
        hold_rows = []
        for (run, call), holds in self._holds.items():
            for hold in holds:
                hold_rows.append((run, call, *hold.place, hold.usd))
        amounts = []
        for row in rows:
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
        for account, (_, start) in self._current_places.items():
            own, slices = self._windows[account, start], self._slices[account, start]
            budget = self._budgets[own.budget]
            limit = budget.usd
            if budget.soft is not None and own.warned_at is None:
                limit = min(limit, ceil(budget.soft * budget.usd) - 1)
            if budget.slices is not None:
                names = _slice_ids(account, budget.slices)
                slices_in_use = [part for part in slices if part.account in names]
                budget_windows.divide(own, slices_in_use, limit - own.spent - own.held)

    def _warn(self, conn: Connection, row: WindowRow) -> None:
        """Give the warning of a window that has reached the soft limit of its budget, once. That of an account with
        slices is given when all of them are at hand."""
        budget = self._budgets.get(row.budget)
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
    finished_calls, accounts = _calls_and_accounts(runs, batch)
    if not finished_calls and not accounts:
        return None
    holds = _delete_holds(conn, finished_calls)
    places = {hold.place for hold in chain.from_iterable(holds.values())}
    ids = {budget_id(account) for account in accounts}
    ids.update([budget_id(account) for account, _ in places])
    if all_slices:
        budget_rows.lock_amounts(conn, sorted(ids))
    now, budgets, latest = budget_rows.budgets_and_windows(conn, sorted(ids), accounts)
    current_places: dict[str, Place] = {}
    ends = {}
    for account in accounts:
        budget = budgets.get(budget_id(account))
        if budget is None:
            continue
        current = _current_window(budget, now, latest.get(account))
        names = [account]
        if budget.slices is not None:
            names = _slice_ids(account, budget.slices)
        own = names[number % len(names)]
        current_places[account] = own, current.start
        needed = {account, *names} if all_slices else {own}
        for name in needed:
            places.add((name, current.start))
            ends[name, current.start] = current.end
    if all_slices:
        whole = {(account_of_slice(name), start) for name, start in places}
        places |= {*whole, *budget_windows.slices_of(conn, whole)}
    windows = budget_windows.lock(conn, places, ends)
    return BudgetLedger(now, budgets, windows, current_places, holds, has_all_slices=all_slices)


def _current_window(budget: Budget, now: float, latest: Window | None) -> Window:
    """Return the window in which an account holds now, given its latest one."""
    current = window(budget.period, budget.zone, now)
    if latest is not None and (now < latest.end or current.start <= latest.start):
        return latest
    return current


def _calls_and_accounts(
    runs: Mapping[str, str | None], batch: Sequence[Entry]
) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the calls that a batch settles, and the accounts in which it holds something, in order; of runs that have
    accounts."""
    finished_calls: list[tuple[str, str]] = []
    accounts: set[str] = set()
    for entry in batch:
        column = runs.get(entry.run)
        if not column:
            continue
        for fact in entry.events:
            if isinstance(fact, CallFinished):
                finished_calls.append((entry.run, fact.call))
            elif isinstance(fact, CallIntended):
                accounts.update(accounts_of(column))
    return finished_calls, sorted(accounts)


def _slice_ids(account: str, slices: int) -> list[str]:
    """Return the ids of the slices of an account."""
    return [slice_of(account, number) for number in range(slices)]


def column_of(accounts: Sequence[str]) -> str:
    """Return the column of a run's row that names its accounts."""
    return orjson.dumps(accounts).decode()


def accounts_of(column: str | None) -> Sequence[str]:
    """Return the accounts that a run's row names."""
    accounts: list[str] = orjson.loads(column) if column else []
    return accounts


def _delete_holds(conn: Connection, calls: Sequence[tuple[str, str]]) -> dict[tuple[str, str], tuple[_Hold, ...]]:
    """Delete the holds of these calls, and return them. The runs' rows are locked, so that nobody else reads them."""
    row = BUDGET_HOLDS.c
    holds: dict[tuple[str, str], tuple[_Hold, ...]] = {}
    if not calls:
        return holds
    deletion = delete(BUDGET_HOLDS).where(tuple_(row.run, row.call).in_(list(calls)))
    for run, call, account, start, usd in conn.execute(
        deletion.returning(row.run, row.call, row.account, row.start, row.usd)
    ):
        holds[run, call] = (*holds.get((run, call), ()), _Hold((account, start), usd))
    return holds


def _add(amounts: dict[Place, int], place: Place, usd: int) -> None:
    amounts[place] = amounts.get(place, 0) + usd
