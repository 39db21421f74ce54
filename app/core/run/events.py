"""The journal's words: event kinds, states, and every legal arrow between states.

    run      admitted -> planned -> running <-> awaiting_tool
             admitted -> running, if steps were queued while the plan still streamed
             any of these -> succeeded | failed | cancelled | expired | over_budget
    step     waiting -> queued -> running <-> awaiting_tool; running -> done
             any open state -> skipped | failed
    attempt  intended -> ok | error | truncated | cancelled | unknown
    plan     open -> accepted | rejected; the next one opens after a rejected one, and, as the next round, after an
             accepted one whose answering step is done and whose steps are settled; and for a step that it is nested in

A run answers its caller in one or several *turns*. Each ends with the run's end, or with calls of the caller's tools:
then every step that can do nothing without them is `awaiting_tool`, `run.awaiting_tool` says so, nobody drives the run,
and `run.resumed` begins the next turn, in the same entry as the results (`step.tool_results`).

A step may be given to the conductor itself. Then it has no ticket and no call: a plan with that step as its `parent` is
opened, which takes it from waiting to running, and when the workflow *nested* in it has answered, that answer is the
step's. All proposals of a run are numbered on, whatever they are nested in, and one at a time is open.

A *round* is one workflow. A further one is a plan with the next number as its `round`, made by a conductor that is
shown the answer of the round before; with the empty plan it takes that answer for the run's. A round may span turns,
and a turn rounds.

`progress.advance` takes no other arrow. A settled step (done, failed, skipped) stays as it is: the driver and a
dispatcher may each write about it without having heard of the other, and then the first fact counts.

An event is a fact with a number inside its run: `seq` starts at 1 and has no gaps, because every write to a run
takes its numbers under that run's row lock. A prefix of a journal is never stale. `body` holds ids, hashes, sizes
and figures; text of callers and workers stands in the content store under its salted hash (`ref`).
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from app.core.records import record


class Kind(StrEnum):
    """What happened."""

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
ENDED: frozenset[str] = frozenset(TERMINAL.values())
RUN_STATES: tuple[str, ...] = ("admitted", "planned", "running", "awaiting_tool", *sorted(ENDED))

RUN_ARROWS: Mapping[str, frozenset[str]] = {
    "admitted": frozenset({"planned", "running"}) | ENDED,
    "planned": frozenset({"running"}) | ENDED,
    "running": frozenset({"awaiting_tool"}) | ENDED,
    "awaiting_tool": frozenset({"running"}) | ENDED,
    **{state: frozenset() for state in ENDED},
}
STEP_ARROWS: Mapping[str, frozenset[str]] = {
    "waiting": frozenset({"queued", "skipped", "failed"}),
    "queued": frozenset({"running", "skipped", "failed"}),
    "running": frozenset({"awaiting_tool", "done", "failed", "skipped"}),
    "awaiting_tool": frozenset({"running", "failed", "skipped"}),
    "done": frozenset(),
    "failed": frozenset(),
    "skipped": frozenset(),
}
OUTCOMES: frozenset[str] = frozenset({"ok", "error", "truncated", "cancelled", "unknown"})

AFTER_THE_END: frozenset[Kind] = frozenset({Kind.CALL_FINISHED})
"""What may still be written once a run has ended: the outcome of a call that was in flight, so that no intent stays
open."""

ANYBODY: frozenset[Kind] = frozenset({Kind.CANCEL_ASKED})
"""What somebody may write who holds neither the run's lease nor one of its tickets: wishes, never facts."""


@record(frozen=True, slots=True)
class Draft:
    """An event before it has its number."""

    kind: Kind
    body: Mapping[str, Any]


@record(frozen=True, slots=True)
class Event:
    """A committed fact. `at` is in seconds since 1970; order is by `seq`, never by `at`."""

    run: str
    seq: int
    kind: Kind
    at: float
    body: Mapping[str, Any]
