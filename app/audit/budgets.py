"""Rules about budgets over several runs: each account has spent what the outcomes in the journal say, and no more.

A budget that was removed for a while holds nothing meanwhile, and runs that were pruned have no outcomes any more: then
the account and the journal are compared only in the direction that is still certain.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from app.audit.account import Account
from app.audit.report import Violation
from app.store.archive import AccountSums

WRONG = "budget-wrong"
NOTHING = AccountSums(spent=0, held=0, holds=0)


def budgets(run: Account) -> Iterator[Violation]:
    """Each call is held in the accounts that the run was admitted with."""
    named = run.admitted.get("budgets") or []
    for call in run.calls.values():
        if (call.intent.body.get("budgets") or []) != named:
            yield run.says(WRONG, call.intent.seq, f"{call.id} is not held in the accounts of its run")


@dataclass(slots=True)
class Books:
    """The sums of the outcomes in the journal, by account, in micro-dollars."""

    spent: Counter[str] = field(default_factory=Counter)

    def add(self, run: Account) -> None:
        """Add the outcomes of a run's calls."""
        for call in run.calls.values():
            if call.outcome is not None:
                self.settle(call.intent.body, call.outcome.body)

    def settle(self, intent: Mapping[str, Any], outcome: Mapping[str, Any]) -> None:
        """Add the outcome of one call, whose intent names the accounts."""
        for name in (intent.get("budgets") or ()) if intent["usd_held"] else ():
            self.spent[name] += outcome["usd"]

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
            sums = after.get(name, NOTHING)
            least = 0 if pruned else before.get(name, NOTHING).spent
            written = self.spent[name]
            is_whole = name.partition("#")[0] not in removed
            if written < least or (is_whole and written > sums.spent):
                yield Violation(f"account {name}", 0, WRONG, f"{sums.spent} is spent, the journal has {written}")
            if sums.held != sums.holds:
                yield Violation(f"account {name}", 0, WRONG, f"{sums.held} is held, its calls hold {sums.holds}")
