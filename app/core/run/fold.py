"""The fold of a run's journal into its state (D2): `advance(state, event) -> state`.

`advance` is pure, believes the journal, ignores events that it has already folded, and needs them in order of `seq`.
Each kind of event has a function that returns the fields of `RunState` which it changes.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from msgspec.structs import replace

from app.core.run import approvals
from app.core.run.approvals import Approval
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    Fact,
    PlanAccepted,
    PlanOpened,
    PlanRejected,
    PlanStep,
    RunAdmitted,
    RunApprovalExpired,
    RunApproved,
    RunAwaitingApproval,
    RunAwaitingTool,
    RunCancelAsked,
    RunEnd,
    RunRefused,
    RunResumed,
    StepAwaitingTool,
    StepDone,
    StepFailed,
    StepQueued,
    StepSkipped,
    StepToolResults,
    read_facts,
)
from app.core.run.kinds import AFTER_THE_END, ENDED, REPLIED, RUN_ARROWS, STEP_ARROWS, TERMINAL, WAITING, Kind
from app.core.run.state import RATE_LIMITED, Call, Exchange, Proposal, RunState, StepState, Turn
from app.errors import EventMalformed


def begin(event: Event) -> RunState:
    """Return the state after a run's first event. Raises `EventMalformed` if that admits no run."""
    return state_of_admission(event.run, event.fact, event.at, event.seq)


def state_of_admission(run: str, fact: Fact, at: float, seq: int) -> RunState:
    """Return the state of a run that this fact admits. Raises `EventMalformed` if it admits none: the event that did is
    missing."""
    if not isinstance(fact, RunAdmitted):
        raise EventMalformed(run, 1)
    turn = Turn(
        number=0,
        deadline=fact.deadline,
        streams=fact.streams,
        at=at,
        on_disconnect=fact.on_disconnect,
        wire=fact.wire,
        gateway=fact.gateway,
        request_id=fact.request_id,
        trace=fact.trace,
    )
    return RunState(run=run, admitted=fact, turn=turn, seq=seq)


def fold(events: tuple[Event, ...], before: RunState | None = None) -> RunState:
    """Return the state that a journal stands for. `events` begin with its first one, or with the first one that the
    state `before` lacks. Raises `EventMalformed` as `advance` does."""
    state = before
    if state is None:
        state = begin(events[0])
    for seq, at, fact in read_facts(events):
        state = _advance_in_order(state, seq, at, fact)
    return state


def fold_turn(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after these events, but for those behind the reply of the present turn."""
    for seq, at, fact in read_facts(events):
        if state.state in REPLIED:
            break
        state = _advance_in_order(state, seq, at, fact)
    return state


def advance(state: RunState, event: Event) -> RunState:
    """Return the state after one more event; one that was folded before changes nothing.

    Raises `EventMalformed` for one that is missing before it, and for one that does not fit the state: an arrow that
    `kinds.py` does not draw, or a step or call that there is not.
    """
    return _advance_in_order(state, event.seq, event.at, event.fact)


def _advance_in_order(state: RunState, seq: int, at: float, fact: Fact) -> RunState:
    if seq <= state.seq:
        return state
    if seq != state.seq + 1:
        raise EventMalformed(state.run, state.seq + 1)
    try:
        return apply_fact(state, fact, at)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise EventMalformed(state.run, seq, "does not fit those before it") from error


def apply_fact(state: RunState, fact: Fact, at: float) -> RunState:
    """Return the state after one more fact, whose event has the next number. Raises KeyError or ValueError for one that
    does not fit the state."""
    seq = state.seq + 1
    if isinstance(fact, RunEnd):
        ended = _check_run_arrow(state, TERMINAL[fact.kind])
        if fact.step is not None and fact.step not in state.steps:
            raise ValueError(f"the run has no step {fact.step}")
        return replace(state, seq=seq, state=ended, end=fact, replied_at=at)
    if state.state in ENDED and fact.kind not in AFTER_THE_END:
        raise ValueError(f"{fact.kind} comes after the run's end")
    changes = _CHANGES_BY_KIND[fact.kind](state, fact)
    if changes.get("state") in WAITING:
        changes["replied_at"] = at
    return replace(state, seq=seq, **changes)


def apply_facts(state: RunState, facts: Iterable[Fact]) -> RunState:
    """Return the state as it would be if these facts were committed next."""
    for fact in facts:
        state = apply_fact(state, fact, at=0.0)
    return state


def apply_facts_if_possible(state: RunState, facts: Iterable[Fact]) -> RunState | None:
    """Return the state as it would be if these facts were committed next; None if `state` lacks events that they
    follow."""
    try:
        return apply_facts(state, facts)
    except (KeyError, ValueError):
        return None


Changes = dict[str, Any]
"""Fields of `RunState` with their new values."""


def _on_cancel_asked(_state: RunState, _fact: RunCancelAsked) -> Changes:
    return {"cancel_asked": True}


def _on_plan_opened(state: RunState, fact: PlanOpened) -> Changes:
    if fact.parent is not None:
        return _open_nested_plan(state, fact, fact.parent)
    last, number = state.proposal, fact.round
    if last is not None and last.state != "rejected":
        over = number == last.round + 1 and state.answer_of_round(last.round) is not None
        if not over or not all(step.settled for step in state.current_steps):
            raise ValueError("a plan is opened while there is another one")
    elif number != state.round:
        raise ValueError("a round is opened before the one before it has answered")
    return {"proposals": (*state.proposals, _proposal(fact))}


def _proposal(fact: PlanOpened) -> Proposal:
    return Proposal(
        number=fact.proposal,
        base=fact.base,
        mode=fact.mode,
        conductor=fact.conductor,
        round=fact.round,
        instant=fact.instant,
        parent=fact.parent,
        room=fact.room,
        waits=fact.waits,
    )


def _open_nested_plan(state: RunState, fact: PlanOpened, n: int) -> Changes:
    """Open a plan for step `n`, which runs from then on: the conductor itself has taken it, so it has no ticket."""
    parent = state.steps[n]
    tries = state.nested.get(parent.n, ())
    expected_state = "running" if tries else "waiting"
    if state.open_proposal is not None or not parent.opens_workflow or parent.state != expected_state:
        raise ValueError(f"a plan is opened for step {parent.n}, which does not wait for one")
    if tries and tries[-1].state != "rejected":
        raise ValueError("a plan is opened while there is another one")
    changes: Changes = {"nested": {**state.nested, parent.n: (*tries, _proposal(fact))}}
    changes["steps"] = {**state.steps, parent.n: replace(parent, state="running")}
    if state.state == "planned":
        return changes | {"state": "running"}
    return changes


def _on_plan_step(state: RunState, fact: PlanStep) -> Changes:
    _open_proposal(state, fact.proposal)
    step = StepState(
        n=fact.n,
        proposal=fact.proposal,
        worker=fact.worker,
        subtask=fact.subtask,
        access=fact.access,
        answers=fact.answers,
        tools=fact.tools,
        complete=fact.complete,
        inherits=fact.inherits,
        subtask_lost=fact.declassified,
    )
    if step.n in state.steps:
        raise ValueError(f"step {step.n} is planned twice")
    return {"steps": {**state.steps, step.n: step}}


def _on_plan_accepted(state: RunState, fact: PlanAccepted) -> Changes:
    accepted = replace(_open_proposal(state, fact.proposal), state="accepted", call=fact.call, topology=fact.topology)
    if state.admitted.approval is not None:
        accepted = replace(accepted, needs=_approval_reasons(state, accepted, fact.price), price=fact.price)
    changes = _replace_latest_proposal(state, accepted)
    if accepted.round > 1 or accepted.parent is not None:
        return changes
    if any(step.state != "waiting" for step in state.current_steps):
        return changes | {"state": _check_run_arrow(state, "running")}
    return changes | {"state": _check_run_arrow(state, "planned")}


def _on_plan_rejected(state: RunState, fact: PlanRejected) -> Changes:
    budget = (fact.budget, fact.budget_until) if fact.budget_until is not None else None
    rejected = replace(
        _open_proposal(state, fact.proposal),
        state="rejected",
        outage=fact.outage,
        reasons=fact.reasons,
        budget=budget,
        call=fact.call,
    )
    return _replace_latest_proposal(state, rejected)


def _replace_latest_proposal(state: RunState, proposal: Proposal) -> Changes:
    if proposal.parent is None:
        return {"proposals": (*state.proposals[:-1], proposal)}
    return {"nested": {**state.nested, proposal.parent: (*state.nested[proposal.parent][:-1], proposal)}}


def _approval_reasons(state: RunState, proposal: Proposal, price: int | None) -> tuple[str, ...]:
    """Return why a plan that is being accepted needs an approval. The empty plan needs none: nothing of it is carried
    out."""
    steps, terms = state.steps_of(proposal), state.admitted.approval
    if terms is None or not steps:
        return ()
    further = any(opened.needs and opened.state == "accepted" for opened in state.all_proposals)
    return approvals.approval_reasons(terms, [step.worker for step in steps], price, state.usd, further=further)


def _check_approved(state: RunState, n: int) -> None:
    """Raise ValueError if a step is to begin that belongs to a plan without the approval that it needs."""
    if state.admitted.approval is None:
        return
    number = state.steps[n].proposal
    if any(proposal.number == number and state.is_gated(proposal) for proposal in state.all_proposals):
        raise ValueError(f"step {n} belongs to a plan that is not approved")


def _on_step_queued(state: RunState, fact: StepQueued) -> Changes:
    _check_approved(state, fact.n)
    changes = _set_step(state, fact.n, state="queued")
    if state.state == "planned":
        return changes | {"state": "running"}
    return changes


def _on_call_intended(state: RunState, fact: CallIntended) -> Changes:
    call = Call(
        fact.call,
        fact.n,
        fact.worker,
        fact.access.user,
        fact.usd_held,
        fact.tokens_held,
        turn=state.turn.number,
    )
    if call.id in state.calls:
        raise ValueError(f"{call.id} is intended twice")
    changes: Changes = {"calls": {**state.calls, call.id: call}}
    if call.step is not None and state.steps[call.step].state == "awaiting_tool":
        raise ValueError(f"step {call.step} waits for results")
    if call.step is not None:
        _check_approved(state, call.step)
    if call.step is None:
        return changes
    return changes | _set_step(state, call.step, state="running", worker=call.worker)


def _on_call_finished(state: RunState, fact: CallFinished) -> Changes:
    open_call = state.calls[fact.call]
    if open_call.outcome is not None:
        raise ValueError(f"{open_call.id} has its outcome already")
    call = replace(
        open_call,
        outcome=fact.outcome,
        usage=fact.usage,
        usd=fact.usd,
        seconds=fact.seconds,
        limited=fact.error == RATE_LIMITED,
        empty=fact.is_empty_answer,
        out_of_time=fact.out_of_time,
    )
    return {"calls": {**state.calls, call.id: call}}


def _on_step_awaiting(state: RunState, fact: StepAwaitingTool) -> Changes:
    step = state.steps[fact.n]
    ids = tuple(call.id for call in fact.calls)
    exchange = Exchange(fact.call, step.worker, fact.said, ids, state.turn.number, chars=fact.chars)
    return _set_step(state, step.n, state="awaiting_tool", exchanges=(*step.exchanges, exchange))


def _on_step_results(state: RunState, fact: StepToolResults) -> Changes:
    step = state.steps[fact.n]
    has_called = bool(step.exchanges)
    if state.state != "running" or not has_called or (not step.settled and step.state != "awaiting_tool"):
        raise ValueError(f"step {step.n} waits for no results")
    answered = replace(step.exchanges[-1], results=fact.results, labels=fact.labels)
    return _set_step(state, step.n, state="running", exchanges=(*step.exchanges[:-1], answered))


def _on_awaiting(state: RunState, fact: RunAwaitingTool) -> Changes:
    return {"state": _check_run_arrow(state, "awaiting_tool"), "turn": replace(state.turn, until=fact.until)}


def _on_resumed(state: RunState, fact: RunResumed) -> Changes:
    if state.state != "awaiting_tool":
        raise ValueError("the run waits for no tool results")
    turn = Turn(
        number=state.turn.number + 1,
        deadline=fact.deadline,
        streams=fact.streams,
        request=fact.request,
        at=fact.at,
        on_disconnect=fact.on_disconnect,
        wire=fact.wire,
        gateway=fact.gateway,
        request_id=fact.request_id,
        trace=fact.trace,
    )
    return {"state": _check_run_arrow(state, "running"), "turn": turn}


def _on_awaiting_approval(state: RunState, fact: RunAwaitingApproval) -> Changes:
    proposal = state.awaits_approval
    if proposal is None or proposal.number != fact.proposal:
        raise ValueError(f"plan {fact.proposal} waits for no approval")
    turn = replace(state.turn, until=fact.until)
    return {"state": _check_run_arrow(state, "awaiting_approval"), "turn": turn, "approval_question": fact}


def _on_approved(state: RunState, fact: RunApproved) -> Changes:
    """Let the turn go on, with the time that it had left."""
    _check_approval_question(state, fact.proposal, fact.digest)
    approval = Approval(fact.digest, fact.workers, fact.max_usd)
    turn = replace(state.turn, deadline=fact.deadline)
    approved = {**state.approvals, fact.proposal: approval}
    return {"state": _check_run_arrow(state, "running"), "turn": turn, "approvals": approved}


def _on_refused(state: RunState, fact: RunRefused) -> Changes:
    """Note the refusal. The run's end is a later event, as a rule of the same entry."""
    _check_approval_question(state, fact.proposal, fact.digest)
    return {"refused": True}


def _on_approval_expired(state: RunState, fact: RunApprovalExpired) -> Changes:
    """Drop the plan. A first round begins anew; what has answered or runs already stays as it is."""
    question = _check_approval_question(state, fact.proposal, None)
    dropped = state.find_proposal(question.proposal)
    dropped = replace(dropped, state="rejected", reasons=(approvals.EXPIRED,), topology="")
    is_first_round = dropped.round == 1 and dropped.parent is None
    next_state = "admitted" if is_first_round else "running"
    return _replace_latest_proposal(state, dropped) | {
        "state": _check_run_arrow(state, next_state),
        "turn": replace(state.turn, deadline=fact.deadline),
    }


def _check_approval_question(state: RunState, proposal: int, digest: str | None) -> RunAwaitingApproval:
    """Return the present question for an approval. Raises ValueError if there is none, or another one."""
    question = state.approval_question
    if state.state != "awaiting_approval" or question is None or state.refused:
        raise ValueError("the run waits for no approval")
    if question.proposal != proposal or digest not in (None, question.digest):
        raise ValueError("another plan waits for an approval")
    return question


def _on_step_done(state: RunState, fact: StepDone) -> Changes:
    if state.steps[fact.n].state == "waiting" and not fact.origin_run:
        raise ValueError(f"step {fact.n} was not called, and its output is of no earlier run")
    output = {"output": fact.output, "chars": fact.chars, "logprobs": fact.logprobs, "refusal": fact.refusal}
    ended = {"call": fact.call, "finish": fact.finish, "stop_sequence": fact.stop_sequence}
    labels = fact.labels if fact.origin_run else None
    return _set_step(
        state, fact.n, state="done", **output, **ended, output_lost=fact.declassified, origin_labels=labels
    )


def _on_step_failed(state: RunState, fact: StepFailed) -> Changes:
    budget = (fact.budget, fact.budget_until) if fact.budget_until is not None else None
    return _set_step(state, fact.n, state="failed", error=fact.error, retry_after=fact.retry_after, budget=budget)


def _on_step_skipped(state: RunState, fact: StepSkipped) -> Changes:
    return _set_step(state, fact.n, state="skipped", error=fact.reason)


def _set_step(run: RunState, n: int, /, *, state: str, **changes: Any) -> Changes:
    step = run.steps[n]
    if step.settled:
        return {}
    again = state == step.state == "running"  # another attempt
    if state not in STEP_ARROWS[step.state] and not again:
        raise ValueError(f"step {n} cannot go from {step.state} to {state}")
    return {"steps": {**run.steps, n: replace(step, state=state, **changes)}}


def _check_run_arrow(run: RunState, to: str) -> str:
    if to not in RUN_ARROWS[run.state]:
        raise ValueError(f"the run cannot go from {run.state} to {to}")
    return to


def _open_proposal(state: RunState, number: int) -> Proposal:
    proposal = state.open_proposal
    if proposal is None or proposal.number != number:
        raise ValueError(f"the plan {number} is not open")
    return proposal


def _on_admitted(state: RunState, _fact: RunAdmitted) -> Changes:
    if state.seq:
        raise ValueError("a run is admitted once")
    return {}


_CHANGES_BY_KIND: Mapping[Kind, Callable[[RunState, Any], Changes]] = {
    Kind.ADMITTED: _on_admitted,
    Kind.CANCEL_ASKED: _on_cancel_asked,
    Kind.PLAN_OPENED: _on_plan_opened,
    Kind.PLAN_STEP: _on_plan_step,
    Kind.PLAN_ACCEPTED: _on_plan_accepted,
    Kind.PLAN_REJECTED: _on_plan_rejected,
    Kind.STEP_QUEUED: _on_step_queued,
    Kind.CALL_INTENDED: _on_call_intended,
    Kind.CALL_FINISHED: _on_call_finished,
    Kind.STEP_AWAITING: _on_step_awaiting,
    Kind.STEP_RESULTS: _on_step_results,
    Kind.STEP_DONE: _on_step_done,
    Kind.STEP_FAILED: _on_step_failed,
    Kind.STEP_SKIPPED: _on_step_skipped,
    Kind.AWAITING: _on_awaiting,
    Kind.RESUMED: _on_resumed,
    Kind.AWAITING_APPROVAL: _on_awaiting_approval,
    Kind.APPROVED: _on_approved,
    Kind.REFUSED: _on_refused,
    Kind.APPROVAL_EXPIRED: _on_approval_expired,
}
