"""The result of an audit: violations of named rules, counts of what was checked and of what cannot be verified."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from msgspec import Struct

MAX_KEPT_VIOLATIONS = 10_000
"""Violations that are kept in full; further ones are only counted."""


class Violation(Struct, frozen=True):
    """One contradiction between the journal and a rule. `seq` is the event that shows it, or 0 for the run as a whole;
    `what` is one line with ids, names and figures only. `baton audit check --json` prints the fields under their
    names."""

    run: str
    seq: int
    rule: str
    what: str

    def __str__(self) -> str:
        return f"{self.run} seq {self.seq} {self.rule}: {self.what}"


@dataclass(slots=True)
class Report:
    """The findings of an audit."""

    runs: int = 0
    events: int = 0
    calls: int = 0
    rebuilt_requests: int = 0
    """The number of requests that were composed and rendered again."""
    unverifiable: Counter[str] = field(default_factory=Counter)
    """The numbers of requests and texts that can no longer be compared, by reason."""
    pruned: int = 0
    """The number of runs that were pruned, of which a row with a hash is left."""
    pending: int = 0
    """The number of calls and steps of ended runs whose outcome is not written yet."""
    rules: Counter[str] = field(default_factory=Counter)
    """The number of violations of each rule."""
    violations: list[Violation] = field(default_factory=list)

    def add(self, violation: Violation) -> None:
        """Add a violation."""
        self.rules[violation.rule] += 1
        if len(self.violations) < MAX_KEPT_VIOLATIONS:
            self.violations.append(violation)

    def include(self, other: "Report") -> None:
        """Add the findings of another report."""
        for name in ("runs", "events", "calls", "rebuilt_requests", "unverifiable", "pruned", "pending", "rules"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.violations += other.violations[: MAX_KEPT_VIOLATIONS - len(self.violations)]

    @property
    def is_clean(self) -> bool:
        """Return True if no rule was broken."""
        return not self.rules


RULES: Mapping[str, tuple[str, str]] = {
    # the journal's form
    "body-malformed": ("N-8", "an event's body lacks a field, or a value has a wrong type"),
    "unknown-kind": ("N-8", "an event's kind is none that a journal has"),
    "seq-gap": ("N-8", "events are numbered from 1 without gaps"),
    "seq-order": ("N-8", "no number is given twice, and events stand in their order"),
    "not-admitted": ("N-1", "a run's first event is its admission, and there is one"),
    # the run
    "terminal-twice": ("N-2 I-13", "a run ends once"),
    "after-the-end": ("I-13", "after the end only outcomes of calls are written"),
    "overdue": ("N-2", "a run has ended 60 s after its deadline at the latest"),
    "run-arrow": ("I-13", "a run goes through its states in the drawn order"),
    "turn-out-of-order": ("I-13", "a turn ends with calls of the caller's tools, the next begins with their results"),
    "end-unfounded": ("N-2", "a run ends as its events demand"),
    "answer-wrong": ("I-14", "the answer is the output of the step that answers"),
    "degraded-wrong": ("N-7", "`degraded` says whether a fallback decided, a step was lost or a round failed"),
    "deadline-wrong": ("I-8", "a turn may take the seconds of the limits, and a later one what its request says"),
    # plans
    "plan-out-of-order": ("I-5", "a plan is opened, gets its steps, and is accepted or rejected, one at a time"),
    "decision-missing": ("I-4", "each first plan of a selector has its decision, and no other plan has one"),
    "decision-wrong": ("I-4", "a decision's probabilities add up, and its propensity is that of its action"),
    "decision-unfollowed": ("I-4", "a selector's plan is the arm that was drawn, among workers of the run's pool"),
    "plan-mode": ("I-4 I-8", "a first plan, one repair, then the fallback; by the run's conductor, or without one"),
    "round-out-of-order": ("I-8", "a round is opened when the one before has answered and its steps are settled"),
    "plan-count": ("I-5", "an accepted plan has the steps and the topology that it says"),
    "plan-not-what-was-said": ("I-5", "the steps of a plan are those of the planning call's output"),
    "plan-call": ("I-5", "a plan comes from a successful planning call of its own proposal, never from a step"),
    "plan-shape": ("I-5", "a fallback is one step that answers the conversation"),
    "order-wrong": ("I-4", "the workers that a conductor is shown are the run's pool"),
    "answering-step": ("I-5", "the last step of a plan answers, and no other; only a further round may be empty"),
    "step-number": ("I-9", "the numbers of steps continue those of earlier plans"),
    "steps-over-limit": ("I-8", "a plan has at most as many steps as the limits say"),
    "rounds-over-limit": ("I-8", "a run has at most as many rounds as the limits say"),
    "nested-wrong": ("I-5 I-8", "a plan is nested in a step of the conductor's whose turn has come, in the same round"),
    "access-widened": ("I-1 I-9", "a nested step sees its parent's view or nothing of it, and steps of its own plan"),
    "worker-outside-pool": ("I-4", "every worker is in the pool that the run was admitted with"),
    "access-forward": ("I-9", "an access list names `user`, earlier steps of the same plan and the previous answer"),
    "pool-outside-tier": ("I-4 I-6", "a run's pool is part of its tier's"),
    "limits-widened": ("I-6", "a run's limits are at most its tier's"),
    # steps
    "step-unplanned": ("I-5", "only planned steps are executed"),
    "step-arrow": ("I-13", "a step goes through its states in the drawn order"),
    "done-twice": ("N-4", "a step is completed at most once"),
    "call-after-done": ("N-4", "no call is intended for a step that is done or failed"),
    "done-without-call": ("N-4", "a step is done by a successful call of its own, with that call's output"),
    "kept-wrong": ("N-4 I-5", "only a replay takes outputs and tool results over, and from the run that it repeats"),
    "kept-altered": ("I-2 I-14", "an output that was taken over is that of the step that is named, with its labels"),
    "tool-calls-wrong": ("I-5", "a step waits for the tool calls of its own successful call, if its plan lets it"),
    "tool-results-wrong": ("I-5 I-9", "results answer exactly the calls that their step waits for"),
    "step-left-open": ("N-2", "when a run ends every step is settled"),
    "queued-too-early": ("I-9", "a step is queued when its inputs are settled and, if it answers, its plan accepted"),
    "fan-out-over-limit": ("I-8", "no more steps are under way than the limits say"),
    "preview-executed": ("I-6", "no step of a preview is executed"),
    # approvals
    "unapproved": ("I-5 I-6", "no step begins, and no worker is called, without the approval that it needs"),
    "approval-wrong": ("I-6", "an approval is for exactly what was asked, in time, and allows no more than that"),
    # calls
    "outcome-without-intent": ("N-3 I-10", "every outcome has its intent before it"),
    "outcome-twice": ("N-3 I-10", "a call has one outcome"),
    "outcome-missing": ("N-3", "a call of an ended run has its outcome"),
    "outcome-illegal": ("N-3", "an outcome is ok, error, truncated, cancelled or unknown, with the step of its intent"),
    "call-twice": ("I-10", "a call is intended once"),
    "attempt-number": ("I-10", "the attempts of a step are counted from 1, each number once"),
    "attempts-over-limit": ("I-8 N-4", "a step has at most as many attempts as the limits say"),
    "retry-without-failure": ("N-4", "a step is tried again only after an outcome that is not ok"),
    "access-not-planned": ("I-1 I-9", "a call is given the access list of its step"),
    "access-unsettled": ("I-9", "the steps that a call may see are settled when it is intended"),
    "call-after-deadline": ("I-8", "no call is intended after the run's deadline"),
    "output-over-limit": ("I-8", "a call may write at most what limits and worker allow"),
    "worker-changed": ("I-4", "provider and model of a call are those of the worker in the pool's snapshot"),
    "version-not-in-force": (
        "I-4",
        "a conductor is asked under the version, and a tier served by what, that was put in force",
    ),
    "rule": ("I-2", "every worker that was called is permitted by every rule that applies to what it reads"),
    "clearance": ("I-2", "every worker that was called is cleared for all labels of what it reads"),
    "declassified": ("I-2", "a text loses only labels that its writer had read and declassifies"),
    # money
    "over-cap": ("I-7", "when a call is intended, held and spent together are within the caps"),
    "reservation-low": ("I-7", "what is held for a call is at least its worst case"),
    "cut-wrong": ("I-7", "an output is cut only where money is short, and to the floor of the tier at the most"),
    "stand-in-wrong": ("I-14", "only the output of a step that was asked for the whole answer may stand in for it"),
    "mask-wrong": ("I-7", "an arm or a worker is left out for its price only if it cannot be paid; the others can"),
    "cost-wrong": ("N-7", "a call costs its usage at the worker's price; an unknown outcome costs what was held"),
    "usage-wrong": ("I-15", "cached is part of input, reasoning part of output"),
    "bill-wrong": ("N-7 I-15", "the run's bill is the sum over its calls, split into visible and orchestration"),
    "row-ledger": ("N-7", "caps, held and spent of the run's row are those of its limits and calls"),
    "budget-wrong": ("N-7", "calls are held in the accounts of their run, which spend what the journal says"),
    # the row, the outbox, the contents
    "row-projection": ("N-7", "the columns of the run's row follow from its events"),
    "ticket-missing": ("N-2", "a step that is queued or running has its ticket in the outbox"),
    "ticket-left": ("N-2", "the outbox has no ticket that is not needed"),
    "content-altered": ("I-1 I-14", "a content's ref is the hash of the run's salt and its bytes"),
    "content-missing": ("N-8", "every content that the journal names is stored, unless all were erased"),
    "content-foreign": ("I-1", "no content is stored that the journal does not name, or that was erased"),
    "text-left": ("I-1", "every text of a conversation belongs to a run whose content was not erased"),
    "chars-wrong": ("I-14", "a step's output is as long as its event says"),
    "catalog-missing": ("I-4", "there is a snapshot of every pool that a run or a call names"),
    "catalog-altered": ("I-4", "a pool's snapshot has the digest that it is stored under"),
    # keys, tenants, budgets, holds and conductors
    "change-unlogged": ("N-8", "keys, tenants, budgets, holds and conductors are as the log of changes says"),
    "change-log-broken": ("N-8", "each logged change begins with what the one before has left"),
    "hold-broken": ("N-8", "nothing of a run is erased, and no run is pruned, while a legal hold covers it"),
    # runs that are not stored any more
    "run-lost": ("N-1", "a run is stored, or was pruned, which leaves a row; nothing else removes it"),
    "pruned-left": ("N-8", "of a run that was pruned nothing is stored but the row that says so"),
    "journal-rewritten": ("N-8", "a run has the events that an earlier export has, or was pruned with them"),
    # the ledger of disclosures
    "disclosure-missing": ("I-1 N-8", "each call has its row in the ledger of disclosures"),
    "disclosure-surplus": ("I-1 N-8", "the ledger of disclosures has no row without a call"),
    "disclosure-altered": ("I-1 N-8", "a row of the ledger of disclosures says what the journal says of its call"),
    "disclosed-wrong": (
        "I-1 I-2",
        "an intent says what its call discloses, and by whose decision, as it follows from what came before",
    ),
    # requests
    "brief-wrong": ("I-1", "a conductor is shown the budget that is left, and the text that was rejected"),
    "template-unknown": ("I-1", "a call names the template that its messages were made with"),
    "request-altered": ("I-1", "composed and rendered again, a request is what its intent says was sent"),
}
"""Every rule with the promises that it stands for, and the statement that holds if it is kept."""
