"""The next commands of a run's driver: `decide(state, now) -> commands`, a pure function of the folded journal (D2).

A driver that dies between a decision and its event loses nothing, since the next driver folds the same journal and
decides the same.

    nothing proposed ........ Propose(first)         a step's inputs are settled .... Queue
    rejected once ........... Propose(repair)        all its inputs are lost ........ Skip
    lost with its engine .... Propose (as before)
    rejected again, or out,
    or not to be paid ....... Propose(fallback)      all steps settled, or time up .. Finish
    a round has answered .... Propose(first)         nothing goes on without tools .. Await
    a step is the conductor's Propose(its parent)    what is nested has answered .... Conclude
    a plan needs an approval  AwaitApproval          nobody approved it in time ..... Finish, or DropPlan

A round that has answered is followed by another one while the limits allow it: its conductor is shown the answer, and
takes it for final with the empty plan. A run whose money or time does not suffice for the answering step ends with the
best output that another step of its workflow gave, if that was asked for the whole answer. Whatever goes wrong after
the first round's answer (no plan, no money, no time, a lost step) ends the run with the last answer that there is, as a
degraded success; only a cancellation does not.

A step that the conductor itself takes is the task of a nested workflow (recursion). Its plan's `user` is that step's
view: the subtask, and what the step's access list grants, nothing else. So authority never widens inside, and what is
nested is no new kind of thing: the same proposals, steps, tickets and calls, in the same run, with the same pool,
labels, budget and deadline. It ends because a plan may name the conductor only down to the limit of depth, and because
the steps of a round, nested ones included, are never more than the limit of steps.
"""

from collections.abc import Sequence

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.workflow import Access
from app.core.pool.breaker import NO_TIME
from app.core.pool.catalog import ApprovalTerms
from app.core.run import approvals
from app.core.run.kinds import DRIVER_LOST, Kind, Mode
from app.core.run.state import NO_RESULTS, ROUND_OVER, Answer, Proposal, RunState, StepState, answer_of
from app.errors import PlanRejected, RunCancelled, RunExpired, RunFailed, RunOverBudget


class Propose(Struct, frozen=True):
    """Ask a conductor (or the fallback) for proposal `number`, whose steps count from `base`; for the step `parent`, if
    it is to be nested, of at most `room` steps."""

    number: int
    base: int
    mode: Mode
    round: int = 1
    parent: int | None = None
    room: int = 0


class Queue(Struct, frozen=True):
    """Queue these steps: their inputs are settled."""

    steps: tuple[int, ...]


class Skip(Struct, frozen=True):
    """Skip this step: all of its inputs are lost, or its round has ended without it."""

    step: int
    reason: str = "inputs_lost"


class Conclude(Struct, frozen=True):
    """Settle a step that no worker executes (any more): with the answer of the workflow nested in it, or as failed for
    the reason `error`."""

    step: int
    answer: Answer | None = None
    error: str = ""


class Finish(Struct, frozen=True):
    """End the run. For a success `step` is the step that answers. `fell_back` is true if that is not the last step,
    whose output was empty. `stopped` says why the last round has no answer, so that the answer is one of an earlier
    round."""

    kind: Kind
    step: int | None = None
    fell_back: bool = False
    error: str = ""
    stopped: str = ""


class Await(Struct, frozen=True):
    """End the turn with the tool calls of these steps, and release the run until the caller sends their results."""

    steps: tuple[int, ...]


class AwaitApproval(Struct, frozen=True):
    """Release the run until somebody has approved or refused this proposal."""

    proposal: int


class DropPlan(Struct, frozen=True):
    """Drop this proposal, for which nobody has decided in time, for a fallback that needs no approval."""

    proposal: int


Command = Propose | Queue | Skip | Conclude | Await | AwaitApproval | DropPlan | Finish


EXPIRED, OVER_BUDGET = RunExpired.code, RunOverBudget.code
"""The errors of a run that has no time, or no money, left."""
MOST_LOST_ENGINES = 3
"""Engines that may be lost while they make the plan of a round, before the run goes on without that plan."""


def decide(state: RunState, now: float) -> tuple[Command, ...]:
    """Return what the driver should do now; () means: wait for an event or for the deadline."""
    if state.ended:
        return ()
    if state.cancel_asked:
        return (Finish(Kind.CANCELLED, error=RunCancelled.code),)
    if state.is_waiting:
        return _end_of_wait(state, now)
    if now >= state.turn.deadline:
        return (give_up(state, Kind.EXPIRED, EXPIRED),)
    live, current, answering = state.active_steps, state.current_steps, state.answering_step
    answer_is_lost = answering is not None and answering.settled and answering.state != "done"
    if answer_is_lost:
        shortage = _shortage(live)
        if shortage is not None:
            kind, error = shortage
            return (give_up(state, kind, error),)
    proposal = state.proposal
    if proposal is None or proposal.state == "rejected":
        return (_next_proposal(state),)
    if state.admitted.preview:
        if state.has_workflow:
            return (Finish(Kind.SUCCEEDED),)
        return ()
    return (
        _schedule_steps(state, live)
        or _schedule_nested(state, live)
        or _await_approval(state)
        or _await_tools(state, current, answering)
        or _finish(state, current, answering)
    )


def _end_of_wait(state: RunState, now: float) -> tuple[Command, ...]:
    """Return the end of a wait for somebody outside, for tool results or for an approval; nothing while it goes on."""
    if state.state == "awaiting_approval":
        return _end_of_approval_wait(state, now)
    if now >= state.turn.until:  # the caller has left, so an answer of an earlier round is of no use to anybody
        return (Finish(Kind.EXPIRED, error=NO_RESULTS),)
    return ()


def _end_of_approval_wait(state: RunState, now: float) -> tuple[Command, ...]:
    """Return the end of a wait for an approval: nothing before there is a decision, or the time for it is over."""
    if state.refused:
        return (give_up(state, Kind.FAILED, approvals.REFUSED),)
    terms, question = state.admitted.approval, state.approval_question
    if now < state.turn.until or terms is None or question is None:
        return ()
    if _may_fall_back(state, terms, question.proposal):
        return (DropPlan(question.proposal),)
    return (give_up(state, Kind.EXPIRED, approvals.EXPIRED),)


def _may_fall_back(state: RunState, terms: ApprovalTerms, proposal: int) -> bool:
    """Return True if a plan that nobody has approved in time may be replaced: by one worker's answer, which needs no
    approval."""
    last = state.proposal
    if terms.on_expiry != "fallback-plan" or terms.reasons or last is None:
        return False
    free = any(name not in terms.workers for name in state.admitted.pool)
    return free and last.number == proposal and last.round == 1 and last.mode != "fallback"


def _await_approval(state: RunState) -> tuple[Command, ...]:
    """Return the command to wait for an approval, once nothing else goes on, so that no process is needed meanwhile."""
    if state.admitted.approval is None:
        return ()
    pending = state.awaits_approval
    if pending is None or state.open_calls or state.open_proposal is not None:
        return ()
    if any(step.state in ("queued", "running") and not step.opens_workflow for step in state.active_steps):
        return ()
    if pending.mode == "fallback" and any(approvals.EXPIRED in proposal.reasons for proposal in state.proposals):
        return (give_up(state, Kind.EXPIRED, approvals.EXPIRED),)  # nobody has decided on the plan before it either
    return (AwaitApproval(pending.number),)


def _shortage(live: Sequence[StepState]) -> tuple[Kind, str] | None:
    """Return the end of a run whose answering step is lost, if that or another step had no time or no money."""
    lost = {step.error for step in live}
    if NO_TIME in lost or EXPIRED in lost:  # also where the clock of the step's engine is ahead of ours
        return Kind.EXPIRED, EXPIRED
    if OVER_BUDGET in lost:
        return Kind.OVER_BUDGET, OVER_BUDGET
    return None


def _next_proposal(state: RunState, parent: int | None = None) -> Command:
    if parent is None:
        tries, step_limit = state.proposals, 0
    else:
        tries, step_limit = state.nested.get(parent, ()), nested_step_limit(state, parent)
    command = Propose(state.proposal_count, len(state.steps), "first", state.round, parent, step_limit)
    if not tries:
        return command
    last = tries[-1]
    if _is_to_be_made_again(tries):
        return replace(command, mode=last.mode)
    if last.reasons == (approvals.EXPIRED,):
        if last.mode == "fallback":
            return give_up(state, Kind.EXPIRED, approvals.EXPIRED)
        return replace(command, mode="fallback")
    unpaid = OVER_BUDGET in last.reasons
    if unpaid and (last.mode == "fallback" or last.round > 1):
        return give_up(state, Kind.OVER_BUDGET, OVER_BUDGET)
    if last.mode == "first" and not last.outage and not unpaid:
        return replace(command, mode="repair")
    if parent is not None and last.mode == "fallback":
        return Conclude(parent, error=PlanRejected.code)
    if parent is None and (last.mode == "fallback" or last.round > 1):
        return give_up(state, Kind.FAILED, PlanRejected.code)  # no worker answers in place of an answer that is there
    return replace(command, mode="fallback")


def _is_to_be_made_again(tries: Sequence[Proposal]) -> bool:
    """Return True if the latest proposal was lost with its engine, and not so many others of its round that what was
    met while they were made may be what ended their engines."""
    last = tries[-1]
    lost = [tried for tried in tries if tried.reasons == (DRIVER_LOST,) and tried.round == last.round]
    return last in lost and len(lost) < MOST_LOST_ENGINES


def give_up(state: RunState, kind: Kind, error: str) -> Finish:
    """Return the end of a run that cannot go on: with the last answer there is, if an earlier round has given one, or
    in the first round, for want of money or time, with the best output that may stand in for the answer."""
    if state.previous_answer is None:
        return _end_with_best_output(state, error) or Finish(kind, error=error)
    accepted_empty_plan = state.has_workflow and not state.current_steps
    if accepted_empty_plan:  # it has taken the answer of the round before for final
        answer: Answer | None = state.previous_answer
    else:
        answer = state.answer_of_round(state.round)
    if answer is not None:
        return Finish(Kind.SUCCEEDED, answer.step.n, answer.fell_back)
    return Finish(Kind.SUCCEEDED, state.previous_answer.step.n, state.previous_answer.fell_back, stopped=error)


def _end_with_best_output(state: RunState, error: str) -> Finish | None:
    """Return the end of a run of one round that has no money or time left: with its answer, if that has come by now, or
    with what may stand in for it; None if there is neither."""
    if error not in (EXPIRED, OVER_BUDGET) or state.round > 1:
        return None
    answer = state.answer_of_round(1)
    if answer is not None:
        return Finish(Kind.SUCCEEDED, answer.step.n, answer.fell_back)
    best = best_output_so_far(state)
    if best is None:
        return None
    return Finish(Kind.SUCCEEDED, best.n, True, stopped=error)


def best_output_so_far(state: RunState) -> StepState | None:
    """Return the last step of the first round's workflow whose output may stand in for the answer; None if there is
    none."""
    if not state.has_workflow or state.round > 1:
        return None
    for step in reversed(state.current_steps):
        has_text = step.state == "done" and step.chars > 0
        if step.complete and has_text and not step.refusal:
            return step
    return None


def decide_end_again(command: Finish, state: RunState, decided: float) -> Finish:
    """Return the end that follows from a later state than that for which `command` was decided on, at that time. What
    ran has been stopped, so there is no way back; but others may have answered meanwhile."""
    for next_command in decide(state, decided):
        if isinstance(next_command, Finish):
            return next_command
    if state.is_waiting:
        return command
    return give_up(state, command.kind, command.stopped or command.error)


def _schedule_steps(state: RunState, live: Sequence[StepState]) -> tuple[Command, ...]:
    """Return the steps to queue or to skip. A failed or empty input is left out; a step is skipped if nothing is left
    to see.

    While a plan still streams, its steps start as they come, unless money or time is short; the one that answers waits
    until the plan is accepted.
    """
    gated, open_proposal = _find_gated_proposals(state), state.open_proposal
    ready: list[int] = []
    skips: list[Command] = []
    for step in live:
        if step.state != "waiting" or step.proposal in gated or _waits_for_its_plan(step, open_proposal):
            continue
        inputs = [state.steps[n] for n in step.access.steps]
        if not all(earlier.settled for earlier in inputs):
            continue
        if _has_nothing_to_see(step, inputs):
            skips.append(Skip(step.n))
        elif not step.opens_workflow:
            ready.append(step.n)
    free_slots = max(state.admitted.limits.fan_out - _count_busy(live), 0)
    queued = tuple(ready[:free_slots])
    if queued:
        return (*skips, Queue(queued))
    return tuple(skips)


def _waits_for_its_plan(step: StepState, open_proposal: Proposal | None) -> bool:
    """Return True if a step may not begin before its plan, which is still being made, is accepted."""
    if open_proposal is None or step.proposal != open_proposal.number:
        return False
    return step.answers or open_proposal.waits


def _has_nothing_to_see(step: StepState, inputs: Sequence[StepState]) -> bool:
    """Return True if a step was to see only earlier outputs, and all of these are lost or empty."""
    sees_task = step.access.user or step.inherits
    if sees_task or not inputs:
        return False
    return not any(earlier.chars for earlier in inputs)


def _count_busy(steps: Sequence[StepState]) -> int:
    """Return how many steps take a place of the fan-out. A step of the conductor's takes none: its nested steps do."""
    busy = 0
    for step in steps:
        if step.state in ("queued", "running", "awaiting_tool") and not step.opens_workflow:
            busy += 1
    return busy


def _find_gated_proposals(state: RunState) -> frozenset[int]:
    """Return the proposals of which no step may begin, by number: they are to be approved."""
    if state.admitted.approval is None:
        return frozenset()
    return frozenset([proposal.number for proposal in state.all_proposals if state.is_gated(proposal)])


def _schedule_nested(state: RunState, live: Sequence[StepState]) -> tuple[Command, ...]:
    """Return the next command for the steps that the conductor takes: a plan, another one after a rejection, or an end.

    One plan at a time is made, so that a conductor is shown the one that it is to repair.
    """
    if not state.admitted.limits.depth:
        return ()
    openers = [step for step in live if step.opens_workflow]
    for step in openers:
        if step.state == "running":
            commands = _continue_nested(state, step.n)
            if commands:
                return commands
    if state.open_proposal is not None:
        return ()
    gated = _find_gated_proposals(state)
    for step in openers:
        if step.proposal in gated:
            continue
        if step.state == "waiting" and all(state.steps[n].settled for n in step.access.steps):
            return (_next_proposal(state, step.n),)
    return ()


def _continue_nested(state: RunState, parent: int) -> tuple[Command, ...]:
    """Return the commands for the workflow nested in a step. As at the end of a round, steps that the answer did not
    need are settled first."""
    last = state.nested[parent][-1]
    steps = state.steps_of(last)
    if last.state == "rejected":
        return (_next_proposal(state, parent),)
    if last.state == "open" or not steps[-1].settled or _has_active_step(steps):
        return ()
    open_steps = [step for step in steps if not step.settled]
    if open_steps:
        return tuple(Skip(step.n, ROUND_OVER) for step in open_steps)
    return (Conclude(parent, answer_of(steps), steps[-1].error),)


def _await_tools(state: RunState, current: Sequence[StepState], answering: StepState | None) -> tuple[Command, ...]:
    """Return the command to wait for the results of tools, once nothing goes on by itself any more; else none."""
    waiting = tuple([step.n for step in current if step.state == "awaiting_tool"])
    if not waiting:
        return ()
    needed = answering is not None and not answering.settled
    if needed and not state.open_calls and not _has_active_step(current):
        return (Await(waiting),)
    return ()


def _has_active_step(steps: Sequence[StepState]) -> bool:
    return any([step.state in ("queued", "running") for step in steps])


def _finish(state: RunState, current: Sequence[StepState], answering: StepState | None) -> tuple[Command, ...]:
    if answering is None and state.has_workflow:  # the empty plan takes the answer of the round before
        return _succeed(state.previous_answer)
    if answering is None:
        return ()
    if not answering.settled or _has_active_step(current):
        return ()  # a step that waits for tools, and those that wait for it, are not needed once the answer is there
    answer = state.answer_of_round(state.round)
    if answer is None:
        return (give_up(state, Kind.FAILED, answering.error or RunFailed.code),)
    if state.is_last_round:
        return _succeed(answer)
    return _next_round(state, current)


def _succeed(answer: Answer | None) -> tuple[Command, ...]:
    if answer is None:
        return ()
    return (Finish(Kind.SUCCEEDED, answer.step.n, answer.fell_back),)


def _next_round(state: RunState, current: Sequence[StepState]) -> tuple[Command, ...]:
    """Return the commands to skip the steps that the round did not need; once there are none, the one to plan the next
    round, whose conductor is shown the answer."""
    open_steps = [step for step in current if not step.settled]
    if open_steps:
        return tuple(Skip(step.n, ROUND_OVER) for step in open_steps)
    return (Propose(state.proposal_count, len(state.steps), "first", state.round + 1),)


# -- nested workflows


def parent_of(state: RunState, step: StepState) -> StepState | None:
    """Return the step whose nested workflow contains this one; None for a step of the run's own workflow."""
    for n, tries in state.nested.items():
        if any(proposal.number == step.proposal for proposal in tries):
            return state.steps[n]
    return None


def gives_answer(state: RunState, step: StepState) -> bool:
    """Return whether the output of the step becomes the answer of its round: it answers, and so does every step around
    it."""
    if not step.answers:
        return False
    parent = parent_of(state, step)
    return parent is None or gives_answer(state, parent)


def nesting_depth(state: RunState, parent: int | None) -> int:
    """Return the nesting depth of the workflow of the step `parent`; 0 for the run's own."""
    if parent is None:
        return 0
    around = parent_of(state, state.steps[parent])
    if around is None:
        return 1
    return 1 + nesting_depth(state, around.n)


def may_nest(state: RunState, parent: int | None) -> bool:
    """Return whether a plan for `parent` (None: for the run itself) may name the conductor."""
    return nesting_depth(state, parent) < state.admitted.limits.depth


def nested_step_limit(state: RunState, parent: int) -> int:
    """Return how many steps a workflow for `parent` may have, so that a round never has more steps than the limit.

    A step that the conductor takes counts until its workflow is accepted; then that workflow's steps do.
    """
    accepted = {tries[-1].number for tries in state.nested.values() if tries[-1].state == "accepted"}
    conductor_steps = {n for n, tries in state.nested.items() if tries[-1].number in accepted} | {parent}
    current_proposals = accepted | {proposal.number for proposal in state.proposals}
    others = sum(step.n not in conductor_steps and step.proposal in current_proposals for step in state.active_steps)
    return state.admitted.limits.steps - others


def access_in_run(access: Access, parent: StepState, base: int) -> Access:
    """Return an access list as a nested plan writes it, in the run's own numbers: its `user` is what the parent may
    see."""
    own = tuple(n + base for n in access.steps)
    if access.user:
        return Access(parent.access.user, (*parent.access.steps, *own))
    return Access(False, own)
