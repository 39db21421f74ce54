"""Rules about the run as a whole: it begins once, ends once and in time, and follows the arrows between states."""

from collections.abc import Callable, Iterator, Mapping

from app.audit.account import SETTLING, Account, Call, Fact, Step
from app.audit.report import Violation
from app.core.run.kinds import AFTER_THE_END, RUN_ARROWS, TERMINAL, Kind

GRACE = 60.0
"""Seconds after its deadline within which a run must have ended (N-2)."""
ROUNDING = 5.0
"""Seconds that may pass between choosing the deadline and writing the admission."""
FALLBACK = "fallback"
SPARED = frozenset({"run_ended", "round_over"})
"""The reasons for which a step that is not needed is skipped."""
OVER_BUDGET = "run_over_budget"
NO_TIME = "no_time"
"""The error of a step that could not have ended in time: it ends the run before its deadline."""


LEADS_TO: Mapping[Kind, str] = {
    Kind.AWAITING: "awaiting_tool",
    Kind.RESUMED: "running",
    Kind.AWAITING_APPROVAL: "awaiting_approval",
    Kind.APPROVED: "running",
}
"""The kinds that always lead to the same state."""


def lifecycle(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    yield from _ends_once(run)
    yield from _in_time(run)
    yield from _arrows(run)
    if run.end is not None:
        yield from _founded(run, run.end)
        yield from _answer(run, run.end)
    if run.end is not None and not run.unread:
        yield from _degraded(run, run.end)


def _ends_once(run: Account) -> Iterator[Violation]:
    if run.end is None:
        return
    for fact in run.ends[1:]:
        yield run.says("terminal-twice", fact.seq, f"{fact.kind.value} after {run.end.kind.value} at {run.end.seq}")
    for fact in run.facts:
        if fact.seq > run.end.seq and fact.kind not in AFTER_THE_END and fact.kind not in TERMINAL:
            yield run.says("after-the-end", fact.seq, f"{fact.kind.value} after the end at {run.end.seq}")


def _in_time(run: Account) -> Iterator[Violation]:
    for turn in run.turns:
        began, seconds = turn.began, turn.began.body["deadline"] - turn.began.at
        if abs(seconds - run.limits["seconds"]) > ROUNDING:
            yield run.says("deadline-wrong", began.seq, f"turn {turn.number} may take {seconds:.1f} s")
        awaiting = turn.awaiting
        wait = awaiting.body["until"] - awaiting.at if awaiting is not None else 0.0
        if awaiting is not None and wait > run.limits.get("tool_wait", wait) + ROUNDING:
            yield run.says("deadline-wrong", awaiting.seq, f"results may take {wait:.1f} s")
    deadline = run.turns[-1].until
    if run.end is None and run.now > deadline + GRACE:
        yield run.says("overdue", 0, f"not ended {run.now - deadline:.0f} s after its deadline")


def _arrows(run: Account) -> Iterator[Violation]:
    """The run's state follows the arrows. After an illegal one it is the state to which that leads."""
    state = "admitted"
    for fact in run.facts[1:]:
        to = _leads_to(run, fact, state)
        if to is not None and to not in RUN_ARROWS[state]:
            yield run.says("run-arrow", fact.seq, f"from {state} to {to}")
        if to in TERMINAL.values():
            return
        state = to or state


def _leads_to(run: Account, fact: Fact, state: str) -> str | None:
    """Return the state to which this fact leads; None if it changes none."""
    if fact.kind in TERMINAL:
        return TERMINAL[fact.kind]
    if fact.kind is Kind.PLAN_ACCEPTED:
        number = fact.body["proposal"]
        proposal = run.proposals[number] if number < len(run.proposals) else None
        if proposal is not None and (proposal.round > 1 or proposal.parent is not None):
            return None
        steps = proposal.steps if proposal is not None else ()
        started = any(step.facts and step.facts[0].seq < fact.seq for step in steps)
        return "running" if started else "planned"
    if fact.kind in LEADS_TO:
        return LEADS_TO[fact.kind]
    if fact.kind is Kind.APPROVAL_EXPIRED:
        number = fact.body["proposal"]
        first = number < len(run.proposals) and (run.proposals[number].round, run.proposals[number].parent) == (1, None)
        return "admitted" if first else "running"
    begins = fact.kind is Kind.STEP_QUEUED or (fact.kind is Kind.PLAN_OPENED and fact.body.get("parent") is not None)
    if begins and state == "planned":
        return "running"
    return None


def state_of(run: Account) -> str:
    """Return the run's state by its events, for the comparison with its row."""
    if run.end is not None:
        return TERMINAL[run.end.kind]
    state = "admitted"
    for fact in run.facts[1:]:
        state = _leads_to(run, fact, state) or state
    return state


def _founded(run: Account, end: Fact) -> Iterator[Violation]:
    """A run has the events that its kind of end needs."""
    problem = _FOUNDATIONS[end.kind](run, end)
    if problem:
        yield run.says("end-unfounded", end.seq, problem)


def _succeeded(run: Account, end: Fact) -> str:
    own = run.tries()
    last = own[-1] if own else None
    if last is None or not any(proposal.accepted is not None and proposal.steps for proposal in own):
        return "succeeded without an accepted plan"
    if run.admitted["preview"]:
        if last.accepted is not None and last.steps:
            return ""
        return "a preview succeeded without an accepted plan"
    if not run.answered:
        return _cut_short(run, end)
    ended = last.answer is not None or (last.accepted is not None and not last.steps)
    if ended == bool(end.body.get("stopped")):
        return "the last round has an answer or accepts one, or something has stopped it"
    return ""


def _cut_short(run: Account, end: Fact) -> str:
    """Return the fault of a success without an answering step: money or time was over, and a step stands in for it."""
    short = SHORT.get(end.body.get("stopped", ""))
    if short is None or stand_in(run) is None:
        return "succeeded though the answering step is not done"
    return short(run, end)


def stand_in(run: Account) -> Step | None:
    """Return the step whose output stands in for the answer of a run that had no money or time for it: the last one
    of its first workflow that has an output and was asked for the whole answer."""
    own = run.tries()
    if not own or own[-1].round > 1 or own[-1].accepted is None:
        return None
    fit = [step for step in own[-1].steps if step.plan.body.get("complete") and step.done is not None]
    spoken = [step for step in fit if step.done and step.done.body["chars"] and not step.done.body.get("refusal")]
    return spoken[-1] if spoken else None


def _failed(run: Account, end: Fact) -> str:
    spared = run.erased or end.body.get("error") == "content_erased"
    if run.answered and not spared:
        return "failed though the answering step is done"
    return ""


def _wasted(run: Account, end: Fact) -> str:
    """Return a fault if an earlier round has answered, because a failure in a later round must not lose the answer."""
    spared = run.erased or run.unread or end.body.get("error") == "tool_results_missing"
    if spared:
        return ""
    if not run.answered and stand_in(run) is not None:
        return "a step had given an output that stands in for the answer"
    if run.answered[:-1]:
        return "a round before the last one has answered"
    return ""


def _cancelled(run: Account, end: Fact) -> str:
    asked = any(fact.seq < end.seq for fact in run.of(Kind.CANCEL_ASKED))
    if asked:
        return ""
    return "cancelled though nobody asked for it"


def _expired(run: Account, end: Fact) -> str:
    return _wasted(run, end) or _early(run, end)


def _early(run: Account, end: Fact) -> str:
    """Return a fault if the run ended for want of time before its deadline, and no step lacked the time."""
    early = run.turns[-1].until - end.at
    hopeless = any(fact.body["error"] == NO_TIME for fact in run.of(Kind.STEP_FAILED))
    if early > 0 and not hopeless:
        return f"expired {early:.1f} s before the deadline"
    return ""


def _over_budget(run: Account, end: Fact) -> str:
    return _wasted(run, end) or _unpaid(run, end)


def _unpaid(run: Account, end: Fact) -> str:
    """Return a fault if the run ended for want of money, and nothing of it lacked any."""
    steps = any(fact.body["error"] == OVER_BUDGET for fact in run.of(Kind.STEP_FAILED))
    plans = any(OVER_BUDGET in fact.body["reasons"] for fact in run.of(Kind.PLAN_REJECTED))
    if steps or plans:
        return ""
    return "over budget though no reservation was refused"


SHORT: Mapping[str, Callable[[Account, Fact], str]] = {OVER_BUDGET: _unpaid, "run_expired": _early}
"""The reasons for which a step may stand in for the answering one, and what must be true of each."""
_FOUNDATIONS: Mapping[Kind, Callable[[Account, Fact], str]] = {
    Kind.SUCCEEDED: _succeeded,
    Kind.FAILED: _failed,
    Kind.CANCELLED: _cancelled,
    Kind.EXPIRED: _expired,
    Kind.OVER_BUDGET: _over_budget,
}


def _answer(run: Account, end: Fact) -> Iterator[Violation]:
    """The answer is the answering step's output; if that is empty, the last output that is not (I-14)."""
    if end.kind is not Kind.SUCCEEDED or run.admitted["preview"]:
        if end.body["step"] is not None or end.body.get("answer"):
            yield run.says("answer-wrong", end.seq, "an answer without a success")
        return
    fallen = stand_in(run) if not run.answered else None
    chosen = fallen if fallen is not None or not run.answered else run.answered[-1].answer
    if chosen is None or chosen.done is None:
        return
    recorded = (end.body["step"], end.body.get("answer"), end.body.get("finish"), end.body.get("fell_back"))
    said = chosen.done.body
    is_last = fallen is None and chosen is run.answered[-1].steps[-1]
    due = (chosen.n, said["output"], said["finish"], not is_last)
    for name, found, wanted in zip(("step", "output", "finish", "fell_back"), recorded, due, strict=True):
        if found != wanted:
            yield run.says("answer-wrong", end.seq, f"{name} is not that of step {chosen.n}")


def degraded(run: Account) -> set[bool]:
    """Return the values that `degraded` may have.

    A run is degraded if a fallback decided, a step was lost, the last round failed or the time was over before a text
    was complete. Both values are possible if the run's owner and the executor of a step wrote different ends of it.
    """
    if run.end is not None and run.end.body.get("stopped"):
        return {True}
    if any(_was_cut_short(run, call) for call in run.calls.values()):
        return {True}
    planned = [run.tries(None)] + [run.tries(step.n) for step in run.openers]
    latest = [tries[-1] for tries in planned if tries]
    if any(FALLBACK in (proposal.opened.body["mode"], proposal.opened.body["conductor"]) for proposal in latest):
        return {True}
    possible = {False}
    for step in run.planned:
        views = {_lost(fact) for fact in step.facts if fact.kind in SETTLING}
        if views == {True}:
            return {True}
        possible |= views
    return possible


def _was_cut_short(run: Account, call: Call) -> bool:
    """Return True if the time of a call was over before its text was complete, and the run's end could know it."""
    if call.outcome is None or not call.outcome.body.get("out_of_time"):
        return False
    return run.end is None or call.outcome.seq < run.end.seq


def _lost(fact: Fact) -> bool:
    if fact.kind is Kind.STEP_SKIPPED:
        return fact.body["reason"] not in SPARED
    return fact.kind is Kind.STEP_FAILED


def _degraded(run: Account, end: Fact) -> Iterator[Violation]:
    if end.body["degraded"] not in degraded(run):
        yield run.says("degraded-wrong", end.seq, f"degraded is {str(end.body['degraded']).lower()}")
