"""The vocabulary of the journal: event kinds, states, and every legal arrow between states.

    run      admitted -> planned -> running <-> awaiting_tool
             admitted -> running, if steps were queued while the plan still streamed
             planned, running -> awaiting_approval -> running, or -> admitted if the wait ends with another plan
             any of these -> succeeded | failed | cancelled | expired | over_budget
    step     waiting -> queued -> running <-> awaiting_tool; running -> done
             waiting -> done, if a replay takes its output over from the run that it repeats
             any open state -> skipped | failed
    attempt  intended -> ok | error | truncated | cancelled | unknown
    plan     open -> accepted | rejected; the next one opens after a rejected one, and, as the next round, after an
             accepted one whose answering step is done and whose steps are settled; and for a step that it is nested in

A run answers its caller in one or several *turns*. A turn ends with the end of the run, or with calls of the caller's
tools: then every step that can do nothing without their results is `awaiting_tool`, `run.awaiting_tool` records it, no
process drives the run, and `run.resumed` begins the next turn, in the same entry as the results (`step.tool_results`).

A step may be given to the conductor itself. Such a step has no ticket and no call: a plan with that step as its
`parent` is opened, which takes the step from waiting to running, and when the workflow *nested* in it has answered,
that answer becomes the step's. Proposals are numbered through the whole run, whatever they are nested in, and at most
one of them is open at a time.

A plan may need an *approval*. Then none of its steps is queued, and once nothing else goes on `run.awaiting_approval`
lets the run go: no process drives it until `run.approved` or `run.refused`, or until the wait is over. The turn stays
the same. `run.approval_expired` drops the plan for one that needs no approval.

A *round* is one workflow. A further round is a plan with the next number as its `round`, made by a conductor that is
shown the answer of the round before; an empty plan accepts that answer as the run's. A round may span several turns,
and a turn several rounds.

`state.advance` takes no other arrow. A settled step (done, failed, skipped) stays as it is: two writers may each
record an end of the same step before they read each other's events, and then the first event counts.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, Literal


class Kind(StrEnum):
    """The kinds of events, by the names that journals and the API use."""

    ADMITTED = "run.admitted"
    CANCEL_ASKED = "run.cancel_asked"
    PLAN_OPENED = "plan.opened"
    PLAN_STEP = "plan.step"
    PLAN_ACCEPTED = "plan.accepted"
    PLAN_REJECTED = "plan.rejected"
    STEP_QUEUED = "step.queued"
    CALL_INTENDED = "call.intended"
    CALL_FINISHED = "call.finished"
    STEP_AWAITING = "step.awaiting_tool"
    STEP_RESULTS = "step.tool_results"
    STEP_DONE = "step.done"
    STEP_FAILED = "step.failed"
    STEP_SKIPPED = "step.skipped"
    AWAITING = "run.awaiting_tool"
    RESUMED = "run.resumed"
    AWAITING_APPROVAL = "run.awaiting_approval"
    APPROVED = "run.approved"
    REFUSED = "run.refused"
    APPROVAL_EXPIRED = "run.approval_expired"
    SUCCEEDED = "run.succeeded"
    FAILED = "run.failed"
    CANCELLED = "run.cancelled"
    EXPIRED = "run.expired"
    OVER_BUDGET = "run.over_budget"


TERMINAL: Mapping[Kind, str] = {
    Kind.SUCCEEDED: "succeeded",
    Kind.FAILED: "failed",
    Kind.CANCELLED: "cancelled",
    Kind.EXPIRED: "expired",
    Kind.OVER_BUDGET: "over_budget",
}
"""The kinds of events that end a run, each with the state in which the run is then."""
ENDED: frozenset[str] = frozenset(TERMINAL.values())
"""The states of a run that has ended."""
WAITING: frozenset[str] = frozenset({"awaiting_tool", "awaiting_approval"})
"""The states of a run that somebody outside has to move: nobody drives it."""
REPLIED: frozenset[str] = ENDED | WAITING
"""The states of a run in which the reply of the present turn is complete."""
RUN_STATES: tuple[str, ...] = ("admitted", "planned", "running", "awaiting_tool", "awaiting_approval", *sorted(ENDED))

RUN_ARROWS: Mapping[str, frozenset[str]] = {
    "admitted": frozenset({"planned", "running"}) | ENDED,
    "planned": frozenset({"running", "awaiting_approval"}) | ENDED,
    "running": frozenset(WAITING) | ENDED,
    "awaiting_tool": frozenset({"running"}) | ENDED,
    "awaiting_approval": frozenset({"running", "admitted"}) | ENDED,
    **{state: frozenset() for state in ENDED},
}
STEP_ARROWS: Mapping[str, frozenset[str]] = {
    "waiting": frozenset({"queued", "done", "skipped", "failed"}),
    "queued": frozenset({"running", "skipped", "failed"}),
    "running": frozenset({"awaiting_tool", "done", "failed", "skipped"}),
    "awaiting_tool": frozenset({"running", "failed", "skipped"}),
    "done": frozenset(),
    "failed": frozenset(),
    "skipped": frozenset(),
}
OUTCOMES: frozenset[str] = frozenset({"ok", "error", "truncated", "cancelled", "unknown"})
"""The outcomes of an attempt."""

AFTER_THE_END: frozenset[Kind] = frozenset({Kind.CALL_FINISHED})
"""The kinds that may still be written once a run has ended: the outcome of a call that was in flight, so that no intent
stays open."""

WITHOUT_LEASE: frozenset[Kind] = frozenset({Kind.CANCEL_ASKED})
"""The kinds that a process may write without the run's lease and without one of its tickets: requests, never facts."""

Mode = Literal["first", "repair", "fallback"]
"""The origin of a proposal: the first one of its workflow, a repair of a rejected one, or the fixed fallback."""
DRIVER_LOST: Final = "the driver was lost while the plan was made"
"""The reason of a proposal that is made again because nobody is left to finish it."""
OriginKind = Literal["", "plan", "replay", "shadow"]
"""The ways in which a run follows from another one: it executes that one's plan, repeats it, or is its shadow. Empty
for a run that a caller asked for by itself."""
COPIES: Final = ("shadow", "replay")
"""The origin kinds of runs that repeat another one, and have stored its request once more."""
OnDisconnect = Literal["cancel", "finish"]
"""The two ways to treat a run whose last follower has disconnected."""
