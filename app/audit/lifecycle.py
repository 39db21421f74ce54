"""Rules about the run as a whole: it begins once, ends once and in time, and follows the arrows between states."""

from collections.abc import Callable, Iterator, Mapping

from app.audit.approvals import plans_needing_approval
from app.audit.audited_run import FALLBACK, SETTLING_KINDS, AuditedRun, Call, Event, Step
from app.audit.report import Violation
from app.core.run.kinds import AFTER_THE_END, RUN_ARROWS, TERMINAL, Kind

GRACE_SECONDS = 60.0
"""Seconds after its deadline within which a run must have ended (N-2)."""
ROUNDING_SECONDS = 5.0
"""Seconds that may pass between choosing the deadline and writing the admission."""
HARMLESS_SKIPS = frozenset({"run_ended", "round_over"})
"""The reasons for which a step that is not needed is skipped."""
OVER_BUDGET = "run_over_budget"
NO_TIME = "no_time"
APPROVAL_EXPIRED, APPROVAL_REFUSED = "approval_expired", "approval_refused"
RUN_EXPIRED = "run_expired"
"""The error of a step that could not have ended in time: it ends the run before its deadline."""


FIXED_NEXT_STATE: Mapping[Kind, str] = {
    Kind.AWAITING: "awaiting_tool",
    Kind.RESUMED: "running",
    Kind.AWAITING_APPROVAL: "awaiting_approval",
    Kind.APPROVED: "running",
}
"""The kinds that always lead to the same state."""


def check_lifecycle(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    yield from _check_single_end(run)
    yield from _check_deadlines(run)
    yield from _check_state_changes(run)
    if run.end is not None:
        yield from _check_cause_of_end(run, run.end)
        yield from _check_answer(run, run.end)
    if run.end is not None and not run.was_ended_unread:
        yield from _check_degraded(run, run.end)


def _check_single_end(run: AuditedRun) -> Iterator[Violation]:
    if run.end is None:
        return
    for event in run.ends[1:]:
        yield run.violation(
            "terminal-twice", event.seq, f"{event.kind.value} after {run.end.kind.value} at {run.end.seq}"
        )
    for event in run.events:
        if event.seq > run.end.seq and event.kind not in AFTER_THE_END and event.kind not in TERMINAL:
            yield run.violation("after-the-end", event.seq, f"{event.kind.value} after the end at {run.end.seq}")


def _check_deadlines(run: AuditedRun) -> Iterator[Violation]:
    for turn in run.turns:
        seconds = turn.start.body["deadline"] - turn.start.at
        too_long = seconds > run.limits["seconds"] + ROUNDING_SECONDS
        too_short = seconds < run.limits["seconds"] - ROUNDING_SECONDS
        if too_long or (too_short and not turn.number):  # the request of a later turn may give it less time
            yield run.violation("deadline-wrong", turn.start.seq, f"turn {turn.number} may take {seconds:.1f} s")
        if turn.tool_calls is not None:
            wait = turn.tool_calls.body["until"] - turn.tool_calls.at
            if wait > run.limits.get("tool_wait", wait) + ROUNDING_SECONDS:
                yield run.violation("deadline-wrong", turn.tool_calls.seq, f"results may take {wait:.1f} s")
    deadline = run.turns[-1].deadline
    if run.end is None and run.now > deadline + GRACE_SECONDS:
        yield run.violation("overdue", 0, f"not ended {run.now - deadline:.0f} s after its deadline")


def _check_state_changes(run: AuditedRun) -> Iterator[Violation]:
    """The run's state follows the arrows. After an illegal one it is the state to which that leads."""
    state = "admitted"
    for event in run.events[1:]:
        to = _next_state(run, event, state)
        if to is not None and to not in RUN_ARROWS[state]:
            yield run.violation("run-arrow", event.seq, f"from {state} to {to}")
        if to in TERMINAL.values():
            return
        state = to or state


def _next_state(run: AuditedRun, event: Event, state: str) -> str | None:
    """Return the state to which this event leads; None if it changes none."""
    if event.kind in TERMINAL:
        return TERMINAL[event.kind]
    if event.kind is Kind.PLAN_ACCEPTED:
        return _state_after_acceptance(run, event)
    if event.kind in FIXED_NEXT_STATE:
        return FIXED_NEXT_STATE[event.kind]
    if event.kind is Kind.APPROVAL_EXPIRED:
        proposal = run.proposal(event.body["proposal"])
        if proposal is not None and proposal.is_first_workflow:
            return "admitted"
        return "running"
    opens_nested_plan = event.kind is Kind.PLAN_OPENED and event.body.get("parent") is not None
    if state == "planned" and (event.kind is Kind.STEP_QUEUED or opens_nested_plan):
        return "running"
    return None


def _state_after_acceptance(run: AuditedRun, acceptance: Event) -> str | None:
    """Return the state to which the acceptance of a plan leads; None for a further round and for a nested plan. A run
    is already running if a step was started while the plan was still being written."""
    proposal = run.proposal(acceptance.body["proposal"])
    if proposal is None:
        return "planned"
    if not proposal.is_first_workflow:
        return None
    for step in proposal.steps:
        if step.events and step.events[0].seq < acceptance.seq:
            return "running"
    return "planned"


def state_of(run: AuditedRun) -> str:
    """Return the run's state by its events, for the comparison with its row."""
    if run.end is not None:
        return TERMINAL[run.end.kind]
    state = "admitted"
    for event in run.events[1:]:
        state = _next_state(run, event, state) or state
    return state


def _check_cause_of_end(run: AuditedRun, end: Event) -> Iterator[Violation]:
    """A run has the events that its kind of end needs."""
    problem = _FAULT_OF_END[end.kind](run, end)
    if problem:
        yield run.violation("end-unfounded", end.seq, problem)


def _fault_of_success(run: AuditedRun, end: Event) -> str:
    own = run.proposals_for()
    last = own[-1] if own else None
    if last is None or not any(proposal.acceptance is not None and proposal.steps for proposal in own):
        return "succeeded without an accepted plan"
    if run.admission["preview"]:
        if last.acceptance is not None and last.steps:
            return ""
        return "a preview succeeded without an accepted plan"
    if not run.answered_rounds:
        return _fault_of_stand_in(run, end)
    ended = last.answering_step is not None or (last.acceptance is not None and not last.steps)
    if ended == bool(end.body.get("stopped")):
        return "the last round has an answer or accepts one, or something has stopped it"
    return ""


def _fault_of_stand_in(run: AuditedRun, end: Event) -> str:
    """Return the fault of a success without an answering step: money or time was over, and a step stands in for it."""
    fault_of_reason = STAND_IN_REASONS.get(end.body.get("stopped", ""))
    if fault_of_reason is None or stand_in_step(run) is None:
        return "succeeded though the answering step is not done"
    return fault_of_reason(run, end)


def stand_in_step(run: AuditedRun) -> Step | None:
    """Return the step whose output stands in for the answer of a run that had no money or time for it: the last one
    of its first workflow that has an output and was asked for the whole answer."""
    own = run.proposals_for()
    if not own or own[-1].round > 1 or own[-1].acceptance is None:
        return None
    for step in reversed(own[-1].steps):
        if step.completion is None or not step.plan.body.get("complete"):
            continue
        if step.completion.body["chars"] and not step.completion.body.get("refusal"):
            return step
    return None


def _fault_of_failure(run: AuditedRun, end: Event) -> str:
    if run.is_erased or end.body.get("error") == "content_erased":
        return ""
    answered = run.answered_rounds
    if end.body.get("error") == APPROVAL_REFUSED:  # of a plan in a step of this round, whose answer does not count then
        answered = [proposal for proposal in answered if proposal.round < run.proposals_for()[-1].round]
    return "failed though the answering step is done" if answered else ""


def _fault_of_lost_answer(run: AuditedRun, end: Event) -> str:
    """Return a fault if an earlier round has answered, because a failure in a later round must not lose the answer."""
    spared = run.is_erased or run.was_ended_unread or end.body.get("error") == "tool_results_missing"
    if spared:
        return ""
    lacks_approval = end.body.get("error") == APPROVAL_EXPIRED  # an output stands in for want of money or time alone
    if not run.answered_rounds and stand_in_step(run) is not None and not lacks_approval:
        return "a step had given an output that stands in for the answer"
    if run.answered_rounds[:-1]:
        return "a round before the last one has answered"
    return ""


def _fault_of_cancellation(run: AuditedRun, end: Event) -> str:
    has_request = any(event.seq < end.seq for event in run.events_of(Kind.CANCEL_ASKED))
    if has_request:
        return ""
    return "cancelled though nobody asked for it"


def _fault_of_expiry(run: AuditedRun, end: Event) -> str:
    fault = _fault_of_lost_answer(run, end)
    if fault or _lacks_another_approval(run, end):
        return fault
    return _fault_of_early_expiry(run, end)


def _lacks_another_approval(run: AuditedRun, end: Event) -> bool:
    """Return True if the run ended because the fallback, in place of a plan that nobody approved in time, needs an
    approval too."""
    terms = run.admission.get("approval")
    if not terms or end.body.get("error") != APPROVAL_EXPIRED:
        return False
    if all(proposal.approval_expiry is None for proposal in run.proposals):
        return False
    last = run.proposals[-1]
    return last.opening.body["mode"] == FALLBACK and last.number in plans_needing_approval(run, terms)


def _fault_of_early_expiry(run: AuditedRun, end: Event) -> str:
    """Return a fault if the run ended for want of time before its deadline, and no step lacked the time.

    The clock of the process that wrote the end may be behind that of the engine which saw the time of a step run out.
    """
    deadline = run.turns[-1].deadline
    if end.at >= deadline:
        return ""
    for event in run.events_of(Kind.STEP_FAILED):
        error = event.body["error"]
        if error == NO_TIME or (error == RUN_EXPIRED and event.at >= deadline):
            return ""
    return f"expired {deadline - end.at:.1f} s before the deadline"


def _fault_of_budget_end(run: AuditedRun, end: Event) -> str:
    return _fault_of_lost_answer(run, end) or _fault_of_missing_refusal(run, end)


def _fault_of_missing_refusal(run: AuditedRun, end: Event) -> str:
    """Return a fault if the run ended for want of money, and nothing of it lacked any."""
    steps = any(event.body["error"] == OVER_BUDGET for event in run.events_of(Kind.STEP_FAILED))
    plans = any(OVER_BUDGET in event.body["reasons"] for event in run.events_of(Kind.PLAN_REJECTED))
    if steps or plans:
        return ""
    return "over budget though no reservation was refused"


STAND_IN_REASONS: Mapping[str, Callable[[AuditedRun, Event], str]] = {
    OVER_BUDGET: _fault_of_missing_refusal,
    RUN_EXPIRED: _fault_of_early_expiry,
}
"""The reasons for which a step may stand in for the answering one, and what must be true of each."""
_FAULT_OF_END: Mapping[Kind, Callable[[AuditedRun, Event], str]] = {
    Kind.SUCCEEDED: _fault_of_success,
    Kind.FAILED: _fault_of_failure,
    Kind.CANCELLED: _fault_of_cancellation,
    Kind.EXPIRED: _fault_of_expiry,
    Kind.OVER_BUDGET: _fault_of_budget_end,
}


def _check_answer(run: AuditedRun, end: Event) -> Iterator[Violation]:
    """The answer is the answering step's output; if that is empty, the last output that is not (I-14)."""
    if end.kind is not Kind.SUCCEEDED or run.admission["preview"]:
        if end.body["step"] is not None or end.body.get("answer"):
            yield run.violation("answer-wrong", end.seq, "an answer without a success")
        return
    if run.answered_rounds:
        last_round = run.answered_rounds[-1]
        answering_step = last_round.answering_step
        is_last_step = answering_step is last_round.steps[-1]
    else:
        answering_step = stand_in_step(run)
        is_last_step = False
    if answering_step is None or answering_step.completion is None:
        return
    completion = answering_step.completion.body
    checks = (
        ("step", end.body["step"], answering_step.n),
        ("output", end.body.get("answer"), completion["output"]),
        ("finish", end.body.get("finish"), completion["finish"]),
        ("fell_back", end.body.get("fell_back"), not is_last_step),
    )
    for name, recorded, expected in checks:
        if recorded != expected:
            yield run.violation("answer-wrong", end.seq, f"{name} is not that of step {answering_step.n}")


def possible_degraded_values(run: AuditedRun) -> set[bool]:
    """Return the values that `degraded` may have.

    A run is degraded if a fallback decided, a step was lost, the last round failed or the time was over before a text
    was complete. Both values are possible if the run's owner and the executor of a step wrote different ends of it.
    """
    if run.end is not None and run.end.body.get("stopped"):
        return {True}
    if any(_was_cut_short(run, call) for call in run.calls.values()):
        return {True}
    if _has_fallback(run):
        return {True}
    possible = {False}
    for step in run.planned_steps:
        losses = {_is_loss(event) for event in step.events if event.kind in SETTLING_KINDS}
        if losses == {True}:
            return {True}
        possible |= losses
    return possible


def _has_fallback(run: AuditedRun) -> bool:
    """Return True if the latest proposal for the run, or for one of its steps, came from the fallback."""
    parents = [None, *[step.n for step in run.steps_with_workflow]]
    for parent in parents:
        proposals = run.proposals_for(parent)
        if proposals:
            opening = proposals[-1].opening.body
            if FALLBACK in (opening["mode"], opening["conductor"]):
                return True
    return False


def _was_cut_short(run: AuditedRun, call: Call) -> bool:
    """Return True if the time of a call was over before its text was complete, and the run's end could know it."""
    if call.outcome is None or not call.outcome.body.get("out_of_time"):
        return False
    return run.end is None or call.outcome.seq < run.end.seq


def _is_loss(event: Event) -> bool:
    if event.kind is Kind.STEP_SKIPPED:
        return event.body["reason"] not in HARMLESS_SKIPS
    return event.kind is Kind.STEP_FAILED


def _check_degraded(run: AuditedRun, end: Event) -> Iterator[Violation]:
    if end.body["degraded"] not in possible_degraded_values(run):
        yield run.violation("degraded-wrong", end.seq, f"degraded is {str(end.body['degraded']).lower()}")
