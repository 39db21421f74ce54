"""A run is the fold of its journal (D2): `advance(state, event) -> state` and `decide(state, now) -> commands`.

Both are pure. `advance` believes the journal, ignores events that it has already folded, and needs them in order of
`seq`. `decide` says what the run's driver should do next; a driver that dies between a decision and its event loses
nothing, since the next driver folds the same journal and decides the same. The states and their arrows are drawn in
`kinds.py`.

    nothing proposed ........ Propose(first)         a step's inputs are settled .... Queue
    rejected once ........... Propose(repair)        all its inputs are lost ........ Skip
    rejected again, or out .. Propose(fallback)      all steps settled, or time up .. Finish
    a round has answered .... Propose(first)         nothing goes on without tools .. Await
    a step is the conductor's Propose(its parent)    what is nested has answered .... Conclude

A round that has answered is followed by another one while the limits allow it: its conductor is shown the answer, and
takes it for final with the empty plan. Whatever goes wrong after the first answer (no plan, no money, no time, a lost
step) ends the run with the last answer that there is, as a degraded success; only a cancellation does not.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.core.pool.breaker import NO_TIME
from app.core.records import changed
from app.core.run.commands import Await, Command, Conclude, Finish, Propose, Queue, Skip
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
    RunAwaitingTool,
    RunCancelAsked,
    RunEnd,
    RunResumed,
    StepAwaitingTool,
    StepDone,
    StepFailed,
    StepQueued,
    StepSkipped,
    StepToolResults,
)
from app.core.run.kinds import AFTER_THE_END, RUN_ARROWS, STEP_ARROWS, TERMINAL, Kind
from app.core.run.nesting import room
from app.core.run.state import (
    DRIVER_LOST,
    NO_RESULTS,
    ROUND_OVER,
    Answer,
    Call,
    Exchange,
    Proposal,
    RunState,
    StepState,
    Turn,
    answer_of,
)


def begin(event: Event) -> RunState:
    """The state after a run's first event. Raises ValueError if that admits no run."""
    return admit(event.run, event.fact, event.at, event.seq)


def admit(run: str, fact: Fact, at: float, seq: int) -> RunState:
    """The state of a run that this fact admits."""
    if not isinstance(fact, RunAdmitted):
        raise ValueError("a journal begins with an admission")
    turn = Turn(
        number=0,
        deadline=fact.deadline,
        streams=fact.streams,
        at=at,
        on_disconnect=fact.on_disconnect,
        wire=fact.wire,
        gateway=fact.gateway,
    )
    return RunState(run=run, admitted=fact, turn=turn, seq=seq)


def fold(events: tuple[Event, ...], before: RunState | None = None) -> RunState:
    """The state that a journal stands for, given from its first event, or from the first one that `before` lacks."""
    state = before if before is not None else begin(events[0])
    for event in events:
        state = advance(state, event)
    return state


def advance(state: RunState, event: Event) -> RunState:
    """The state after one more event; one that was folded before changes nothing.

    Raises ValueError for a gap, and for an arrow that `kinds.py` does not draw.
    """
    if event.seq <= state.seq:
        return state
    if event.seq != state.seq + 1:
        raise ValueError(f"event {event.seq} does not follow event {state.seq}")
    return advanced(state, event.fact, event.at)


def advanced(state: RunState, fact: Fact, at: float) -> RunState:
    """The state after one more fact, whose event has the next number. Raises ValueError as `advance` does."""
    seq = state.seq + 1
    if isinstance(fact, RunEnd):
        ended = _run_arrow(state, TERMINAL[fact.kind])
        return _changed(state, seq, {"state": ended, "end": fact, "replied_at": at})
    if state.ended and fact.kind not in AFTER_THE_END:
        raise ValueError(f"{fact.kind} comes after the run's end")
    changes = _ADVANCE[fact.kind](state, fact)
    if fact.kind is Kind.AWAITING:
        changes["replied_at"] = at
    return _changed(state, seq, changes)


Changes = dict[str, Any]
"""Fields of `RunState` with their new values."""


def _changed(state: RunState, seq: int, changes: Changes) -> RunState:
    """Written out: `changed` takes longer where most fields stay, and every event of every run comes by here."""
    take = changes.get
    return RunState(
        state.run,
        state.admitted,
        take("turn", state.turn),
        seq,
        take("state", state.state),
        take("proposals", state.proposals),
        take("steps", state.steps),
        take("calls", state.calls),
        take("cancel_asked", state.cancel_asked),
        take("end", state.end),
        take("replied_at", state.replied_at),
        take("nested", state.nested),
    )


def _cancel_asked(_state: RunState, _fact: RunCancelAsked) -> Changes:
    return {"cancel_asked": True}


def _plan_opened(state: RunState, fact: PlanOpened) -> Changes:
    if fact.parent is not None:
        return _nested_opened(state, fact, fact.parent)
    last, number = state.proposal, fact.round
    if last is not None and last.state != "rejected":
        over = number == last.round + 1 and state.answer(last.round) is not None
        if not over or not all(step.settled for step in state.current):
            raise ValueError("a plan is opened while there is another one")
    elif number != state.round:
        raise ValueError("a round is opened before the one before it has answered")
    proposal = Proposal(fact.proposal, fact.base, fact.mode, fact.conductor, round=number)
    return {"proposals": (*state.proposals, proposal)}


def _nested_opened(state: RunState, fact: PlanOpened, n: int) -> Changes:
    """The step runs from then on: it is the conductor's, so nobody has a ticket for it."""
    parent = state.steps[n]
    tries = state.nested.get(parent.n, ())
    if state.unmade is not None or not parent.opens or parent.state != ("running" if tries else "waiting"):
        raise ValueError(f"a plan is opened for step {parent.n}, which does not wait for one")
    if tries and tries[-1].state != "rejected":
        raise ValueError("a plan is opened while there is another one")
    proposal = Proposal(
        fact.proposal,
        fact.base,
        fact.mode,
        fact.conductor,
        round=fact.round,
        parent=parent.n,
        room=fact.room,
    )
    changes: Changes = {"nested": {**state.nested, parent.n: (*tries, proposal)}}
    changes["steps"] = {**state.steps, parent.n: changed(parent, state="running")}
    return changes | {"state": "running"} if state.state == "planned" else changes


def _plan_step(state: RunState, fact: PlanStep) -> Changes:
    _open_proposal(state)
    step = StepState(
        n=fact.n,
        proposal=fact.proposal,
        worker=fact.worker,
        subtask=fact.subtask,
        access=fact.access,
        answers=fact.answers,
        tools=fact.tools,
        inherits=fact.inherits,
    )
    if step.n in state.steps:
        raise ValueError(f"step {step.n} is planned twice")
    return {"steps": {**state.steps, step.n: step}}


def _plan_accepted(state: RunState, fact: PlanAccepted) -> Changes:
    accepted = changed(_open_proposal(state), state="accepted", call=fact.call, topology=fact.topology)
    changes = _decided(state, accepted)
    if accepted.round > 1 or accepted.parent is not None:
        return changes
    started = any(step.state != "waiting" for step in state.current)
    return changes | {"state": _run_arrow(state, "running" if started else "planned")}


def _plan_rejected(state: RunState, fact: PlanRejected) -> Changes:
    rejected = changed(
        _open_proposal(state),
        state="rejected",
        outage=fact.outage,
        reasons=fact.reasons,
        call=fact.call,
    )
    return _decided(state, rejected)


def _decided(state: RunState, proposal: Proposal) -> Changes:
    if proposal.parent is None:
        return {"proposals": (*state.proposals[:-1], proposal)}
    return {"nested": {**state.nested, proposal.parent: (*state.nested[proposal.parent][:-1], proposal)}}


def _step_queued(state: RunState, fact: StepQueued) -> Changes:
    changes = _set_step(state, fact.n, state="queued")
    return changes | {"state": "running"} if state.state == "planned" else changes


def _call_intended(state: RunState, fact: CallIntended) -> Changes:
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
    return changes if call.step is None else changes | _set_step(state, call.step, state="running", worker=call.worker)


def _call_finished(state: RunState, fact: CallFinished) -> Changes:
    known = state.calls[fact.call]
    if known.outcome is not None:
        raise ValueError(f"{known.id} has its outcome already")
    call = changed(
        known,
        outcome=fact.outcome,
        usage=fact.usage,
        usd=fact.usd,
        seconds=fact.seconds,
    )
    return {"calls": {**state.calls, call.id: call}}


def _step_awaiting(state: RunState, fact: StepAwaitingTool) -> Changes:
    step = state.steps[fact.n]
    ids = tuple(one.id for one in fact.calls)
    exchange = Exchange(fact.call, step.worker, fact.said, ids, state.turn.number, chars=fact.chars)
    return _set_step(state, step.n, state="awaiting_tool", exchanges=(*step.exchanges, exchange))


def _step_results(state: RunState, fact: StepToolResults) -> Changes:
    step = state.steps[fact.n]
    if state.state != "running" or (not step.settled and step.state != "awaiting_tool"):
        raise ValueError(f"step {step.n} waits for no results")
    answered = changed(step.exchanges[-1], results=fact.results)
    return _set_step(state, step.n, state="running", exchanges=(*step.exchanges[:-1], answered))


def _awaiting(state: RunState, fact: RunAwaitingTool) -> Changes:
    moved = _run_arrow(state, "awaiting_tool")
    return {"state": moved, "turn": changed(state.turn, until=fact.until)}


def _resumed(state: RunState, fact: RunResumed) -> Changes:
    if state.state != "awaiting_tool":
        raise ValueError("the run waits for nothing")
    turn = Turn(
        number=state.turn.number + 1,
        deadline=fact.deadline,
        streams=fact.streams,
        request=fact.request,
        at=fact.at,
        on_disconnect=fact.on_disconnect,
        wire=fact.wire,
        gateway=fact.gateway,
    )
    return {"state": _run_arrow(state, "running"), "turn": turn}


def _step_done(state: RunState, fact: StepDone) -> Changes:
    return _set_step(
        state,
        fact.n,
        state="done",
        output=fact.output,
        chars=fact.chars,
        finish=fact.finish,
        call=fact.call,
        logprobs=fact.logprobs,
        refusal=fact.refusal,
    )


def _step_failed(state: RunState, fact: StepFailed) -> Changes:
    return _set_step(state, fact.n, state="failed", error=fact.error)


def _step_skipped(state: RunState, fact: StepSkipped) -> Changes:
    return _set_step(state, fact.n, state="skipped", error=fact.reason)


def _set_step(run: RunState, n: int, /, *, state: str, **changes: Any) -> Changes:
    step = run.steps[n]
    if step.settled:
        return {}
    again = state == step.state == "running"  # another attempt
    if state not in STEP_ARROWS[step.state] and not again:
        raise ValueError(f"step {n} cannot go from {step.state} to {state}")
    return {"steps": {**run.steps, n: changed(step, state=state, **changes)}}


def _run_arrow(run: RunState, to: str) -> str:
    if to not in RUN_ARROWS[run.state]:
        raise ValueError(f"the run cannot go from {run.state} to {to}")
    return to


def _open_proposal(state: RunState) -> Proposal:
    if (unmade := state.unmade) is None:
        raise ValueError("no plan is open")
    return unmade


def _admitted(state: RunState, _fact: RunAdmitted) -> Changes:
    if state.seq:
        raise ValueError("a run is admitted once")
    return {}


_ADVANCE: Mapping[Kind, Callable[[RunState, Any], Changes]] = {
    Kind.ADMITTED: _admitted,
    Kind.CANCEL_ASKED: _cancel_asked,
    Kind.PLAN_OPENED: _plan_opened,
    Kind.PLAN_STEP: _plan_step,
    Kind.PLAN_ACCEPTED: _plan_accepted,
    Kind.PLAN_REJECTED: _plan_rejected,
    Kind.STEP_QUEUED: _step_queued,
    Kind.CALL_INTENDED: _call_intended,
    Kind.CALL_FINISHED: _call_finished,
    Kind.STEP_AWAITING: _step_awaiting,
    Kind.STEP_RESULTS: _step_results,
    Kind.STEP_DONE: _step_done,
    Kind.STEP_FAILED: _step_failed,
    Kind.STEP_SKIPPED: _step_skipped,
    Kind.AWAITING: _awaiting,
    Kind.RESUMED: _resumed,
}


def decide(state: RunState, now: float) -> tuple[Command, ...]:
    """Return what the driver should do now; () means: wait for an event or for the deadline."""
    if state.ended:
        return ()
    if state.cancel_asked:
        return (Finish(Kind.CANCELLED, error="run_cancelled"),)
    if state.state == "awaiting_tool":
        return (Finish(Kind.EXPIRED, error=NO_RESULTS),) if now >= state.turn.until else ()
    if now >= state.deadline:
        return (give_up(state, Kind.EXPIRED, "run_expired"),)
    live = state.live
    lost = {step.error for step in live}
    if NO_TIME in lost:
        return (give_up(state, Kind.EXPIRED, "run_expired"),)
    if "run_over_budget" in lost:
        return (give_up(state, Kind.OVER_BUDGET, "run_over_budget"),)
    proposal = state.proposal
    if proposal is None or proposal.state == "rejected":
        return (_propose(state),)
    if state.admitted.preview:
        return (Finish(Kind.SUCCEEDED),) if state.accepted else ()
    return _schedule(state, live) or _within(state, live) or _await(state) or _finish(state)


def _propose(state: RunState, parent: int | None = None) -> Command:
    tries = state.proposals if parent is None else state.nested.get(parent, ())
    last = tries[-1] if tries else None
    space = room(state, parent) if parent is not None else 0
    command = Propose(state.opened, len(state.steps), "first", state.round, parent, space)
    if last is None:
        return command
    if last.reasons == (DRIVER_LOST,):
        return changed(command, mode=last.mode)
    if "run_over_budget" in last.reasons:
        return give_up(state, Kind.OVER_BUDGET, "run_over_budget")
    if last.mode == "first" and not last.outage:
        return changed(command, mode="repair")
    if parent is not None and last.mode == "fallback":
        return Conclude(parent, error="plan_rejected")
    if parent is None and (last.mode == "fallback" or last.round > 1):
        return give_up(state, Kind.FAILED, "plan_rejected")  # no worker answers in place of an answer that is there
    return changed(command, mode="fallback")


def give_up(state: RunState, kind: Kind, error: str) -> Finish:
    """The end of a run that cannot go on: with the last answer there is, if an earlier round has given one."""
    if state.previous is None:
        return Finish(kind, error=error)
    final = state.accepted and not state.current  # the empty plan has taken the answer before
    answer = state.previous if final else state.answer(state.round)
    if answer is not None:
        return Finish(Kind.SUCCEEDED, answer.step.n, answer.fell_back)
    return Finish(Kind.SUCCEEDED, state.previous.step.n, state.previous.fell_back, stopped=error)


def confirmed(command: Finish, state: RunState, decided: float) -> Finish:
    """The end that follows from a later state than that for which `command` was decided on, at that time. What ran has
    been stopped, so there is no way back; but others may have answered meanwhile."""
    follows = next((one for one in decide(state, decided) if isinstance(one, Finish)), None)
    if follows is not None or state.state == "awaiting_tool":
        return follows or command
    return give_up(state, command.kind, command.stopped or command.error)


def _schedule(state: RunState, live: Sequence[StepState]) -> tuple[Command, ...]:
    """Steps to queue or to skip. A failed or empty input is left out; a step is skipped if nothing is left to see.

    While a plan still streams, its steps start as they come; the one that answers waits until the plan is accepted.
    """
    busy = sum(step.state in ("queued", "running", "awaiting_tool") and not step.opens for step in live)
    unmade = state.unmade
    ready: list[int] = []
    skips: list[Command] = []
    for step in live:
        inputs = [state.steps[n] for n in step.access.steps]
        known = not step.answers or unmade is None or step.proposal != unmade.number
        if step.state != "waiting" or not known or not all(earlier.settled for earlier in inputs):
            continue
        if inputs and not (step.access.user or step.inherits) and not any(earlier.chars for earlier in inputs):
            skips.append(Skip(step.n))
        elif not step.opens:
            ready.append(step.n)
    free = max(state.admitted.limits.fan_out - busy, 0)
    queue: tuple[Command, ...] = (Queue(tuple(ready[:free])),) if ready[:free] else ()
    return (*skips, *queue)


def _within(state: RunState, live: Sequence[StepState]) -> tuple[Command, ...]:
    """Return the next command for the steps that the conductor takes: a plan, another one after a rejection, or an end.

    One plan at a time is made, so that a conductor is shown the one that it is to repair.
    """
    if not state.admitted.limits.depth:
        return ()
    openers = [step for step in live if step.opens]
    for step in openers:
        if step.state == "running" and (command := _nested(state, step.n)):
            return command
    if state.unmade is not None:
        return ()
    for step in openers:
        if step.state == "waiting" and all(state.steps[n].settled for n in step.access.steps):
            return (_propose(state, step.n),)
    return ()


def _nested(state: RunState, parent: int) -> tuple[Command, ...]:
    """Return the commands for the workflow nested in a step. As at the end of a round, steps that the answer did not
    need are settled first."""
    last = state.nested[parent][-1]
    steps = state.steps_of(last)
    if last.state == "rejected":
        return (_propose(state, parent),)
    if last.state == "open" or not steps[-1].settled or any(step.state in ("queued", "running") for step in steps):
        return ()
    if open_steps := [step for step in steps if not step.settled]:
        return tuple(Skip(step.n, ROUND_OVER) for step in open_steps)
    return (Conclude(parent, answer_of(steps), steps[-1].error),)


def _await(state: RunState) -> tuple[Command, ...]:
    """Once nothing goes on by itself any more."""
    waiting = tuple(step.n for step in state.current if step.state == "awaiting_tool")
    if not waiting:
        return ()
    needed = state.answering is not None and not state.answering.settled
    return (Await(waiting),) if needed and not state.open_calls and not _busy(state) else ()


def _busy(state: RunState) -> bool:
    return any(step.state in ("queued", "running") for step in state.current)


def _finish(state: RunState) -> tuple[Command, ...]:
    answering = state.answering
    if answering is None:
        return _succeed(state.previous) if state.accepted else ()  # the empty plan takes the answer before
    if not answering.settled or _busy(state):
        return ()  # a step that waits for tools, and those that wait for it, are not needed once the answer is there
    answer = state.answer(state.round)
    if answer is None:
        return (give_up(state, Kind.FAILED, answering.error or "run_failed"),)
    return _succeed(answer) if state.is_last_round else _next_round(state)


def _succeed(answer: Answer | None) -> tuple[Command, ...]:
    return (Finish(Kind.SUCCEEDED, answer.step.n, answer.fell_back),) if answer is not None else ()


def _next_round(state: RunState) -> tuple[Command, ...]:
    """First the steps that the round did not need are settled, then its answer is shown to the conductor."""
    open_steps = [step for step in state.current if not step.settled]
    if open_steps:
        return tuple(Skip(step.n, ROUND_OVER) for step in open_steps)
    return (Propose(state.opened, len(state.steps), "first", state.round + 1),)
