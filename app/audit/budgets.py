"""Rules about budgets over several runs: each account has spent what the outcomes in the journal say, and no more.

A budget that was removed for a while holds nothing meanwhile, and runs that were pruned have no outcomes any more: then
the account and the journal are compared only in the direction that is still certain.
"""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.audit.audited_run import AuditedRun
from app.audit.report import Violation
from app.core.pool.budgets import PERIODS, Window, account_of_slice, budget_id, window
from app.store.archive import AccountSums, Administration

RULE = "budget-wrong"
NOTHING = AccountSums(spent=0, overrun=0, held=0, holds=0)
EARLIER = 0
"""The start and the end of the row into which an account's old windows are summed up."""


def check_budgets(run: AuditedRun) -> Iterator[Violation]:
    """Each call is held in the accounts that the run was admitted with."""
    accounts = run.admission.get("budgets") or []
    for call in run.calls.values():
        if (call.intent.body.get("budgets") or []) != accounts:
            yield run.violation(RULE, call.intent.seq, f"{call.id} is not held in the accounts of its run")


@dataclass(slots=True)
class JournalSums:
    """The sums of the outcomes in the journal, by account, in micro-dollars."""

    spent: Counter[str] = field(default_factory=Counter)
    overrun: Counter[str] = field(default_factory=Counter)
    """The part of it that exceeded what was held for the calls."""

    def add(self, run: AuditedRun) -> None:
        """Add the outcomes of a run's calls."""
        for call in run.calls.values():
            if call.outcome is not None:
                self.settle(call.intent.body, call.outcome.body)

    def settle(self, intent: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        """Add the outcome of one call, whose intent names the accounts."""
        if not intent["usd_held"]:
            return
        for name in intent.get("budgets") or ():
            self.spent[name] += outcome["usd"]
            self.overrun[name] += max(outcome["usd"] - intent["usd_held"], 0)

    def compare(
        self,
        before: Mapping[str, AccountSums],
        after: Mapping[str, AccountSums],
        *,
        removed: Collection[str],
        pruned: bool,
    ) -> Iterator[Violation]:
        """Compare the accounts, as they were read before the runs and after them, with the sums of the journal.

        `removed` are the ids of budgets that were removed at some time; `pruned` says whether runs were pruned.
        """
        for name in sorted({*after, *self.spent}):
            least, most = before.get(name, NOTHING), after.get(name, NOTHING)
            is_whole = name.partition("#")[0] not in removed
            for what, stored, at_least, written in (
                ("spent", most.spent, least.spent, self.spent[name]),
                ("overrun", most.overrun, least.overrun, self.overrun[name]),
            ):
                is_too_low = written < 0 if pruned else written < at_least
                if is_too_low or (is_whole and written > stored):
                    yield Violation(f"account {name}", 0, RULE, f"{stored} is {what}, the journal has {written}")
            if most.held != most.holds:
                yield Violation(f"account {name}", 0, RULE, f"{most.held} is held, its calls hold {most.holds}")


def check_windows(rows: Sequence[Mapping[str, Any]], administration: Administration) -> Iterator[Violation]:
    """Each window of an account names the account's budget, and has the bounds of a period in one of the time zones
    that the budget has had. The bounds are not compared where the log of changes does not know the budget."""
    zones: defaultdict[str, set[str]] = defaultdict(set)
    for row in administration.budgets:
        zones[row["id"]].add(row["zone"])
    for event in administration.events:
        if event["action"] == "budget.set":
            zones[event["target"]].add(orjson.loads(event["after"])["zone"])
    yield from _check_slices(rows)
    for row in rows:
        name, bounds = f"account {row['account']}", Window(row["start"], row["end"])
        budget = budget_id(row["account"])
        if row["budget"] != budget:
            yield Violation(name, 0, RULE, "a window of it names another budget")
        if bounds != Window(EARLIER, EARLIER) and not _is_period_of(bounds, budget, zones.get(budget)):
            yield Violation(name, 0, RULE, f"its window from {bounds.start} to {bounds.end} is none of its budget's")


def _check_slices(rows: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """Each slice of a window names its account, and what the slices have in escrow is what the account's own row says.
    A slice has no warning of its own, and its calls hold and spend no more than it has, apart from overruns."""
    escrow: Counter[tuple[str, int]] = Counter()
    own: Counter[tuple[str, int]] = Counter()
    for row in rows:
        account = account_of_slice(row["account"])
        name, place = f"account {row['account']}", (account, row["start"])
        is_slice = account != row["account"]
        expected_whole = account if is_slice else None
        if row["whole"] != expected_whole:
            yield Violation(name, 0, RULE, "it is a slice of another account than it says")
        if is_slice:
            escrow[place] += row["escrow"]
        else:
            own[place] += row["escrow"]
        if is_slice and row["spent"] + row["held"] - row["overrun"] > row["escrow"]:
            yield Violation(name, 0, RULE, "it holds and has spent more than is in escrow for it")
        if is_slice and row["warned_at"] is not None:
            yield Violation(name, 0, RULE, "it has a warning, which is given for its account")
    for account, start in sorted({*escrow, *own}):
        if escrow[account, start] != own[account, start]:
            words = f"{own[account, start]} is in escrow, its slices have {escrow[account, start]}"
            yield Violation(f"account {account}", 0, RULE, words)


def _is_period_of(bounds: Window, budget: str, zones: Collection[str] | None) -> bool:
    """Return True if these are the bounds of a period of the budget, or if its time zones are not known."""
    period = budget.rpartition("/")[2]
    if zones is None:
        return True
    if period not in PERIODS:
        return False
    try:
        return bounds in [window(period, zone, bounds.start) for zone in zones]
    except (OverflowError, ValueError, OSError):  # no time of any calendar
        return False
