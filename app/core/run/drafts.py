"""The facts that a driver writes where they follow from its state or its command; `events.py` has the records."""

from collections.abc import Iterable, Sequence

from msgspec import Struct
from msgspec.structs import replace

from app.core.plan.digest import plan_digest
from app.core.plan.workflow import Step, asks_for_answer, topology
from app.core.pool.catalog import Catalog
from app.core.run import approvals
from app.core.run.caller_view import bill
from app.core.run.events import (
    ENDS,
    Fact,
    PlanAccepted,
    PlanOpened,
    PlanRejected,
    PlanStep,
    RunApprovalExpired,
    RunAwaitingApproval,
    RunAwaitingTool,
    RunEnd,
    RunResumed,
    StepDone,
    StepFailed,
    StepSkipped,
)
from app.core.run.progress import OVER_BUDGET, Await, Conclude, DropPlan, Finish, Propose, Skip, access_in_run
from app.core.run.recording import KeptOutput
from app.core.run.state import Proposal, RunState, StepState, Turn
from app.errors import RunFailed

MOST_REASONS = 50
"""Reasons that are kept of a rejected plan."""


def plan_opened(command: Propose, conductor: str, order: Sequence[str], *, instant: bool) -> PlanOpened:
    """Return the opening of the plan that a command wants. `conductor` is asked for it, and is shown the workers in
    this order."""
    return PlanOpened(
        proposal=command.number,
        base=command.base,
        mode=command.mode,
        conductor=conductor,
        round=command.round,
        order=tuple(order),
        instant=instant,
        parent=command.parent,
        room=command.room,
    )


class WrittenStep(Struct, frozen=True):
    """A step of a plan with the refs of its texts: its subtask, and the conductor's reasons for the worker and for the
    access list. The subtask has lost the labels `declassified`."""

    step: Step
    subtask: str
    why: str = ""
    why_withheld: str = ""
    declassified: frozenset[str] = frozenset()


def plan_step(
    proposal: Propose | Proposal,
    place: int,
    written: WrittenStep,
    previous: int | None = None,
    parent: StepState | None = None,
    *,
    may_stand_in: bool = True,
) -> PlanStep:
    """Return the step at this place of a proposal, with its access list in the run's own numbers.

    `previous` is the step that gave the answer of the round before, `parent` the one that this is nested in. No step
    may stand in for the answering one where the answer has a form that only that one is given.
    """
    step, base = written.step, proposal.base
    access = step.access.shift(base, previous)
    if parent is not None:
        access = access_in_run(step.access, parent, base)
    could_answer = not step.answers and step.access.user and asks_for_answer(step.subtask)
    return PlanStep(
        proposal=proposal.number,
        n=base + place,
        worker=step.worker,
        subtask=written.subtask,
        access=access,
        answers=step.answers,
        probability=step.probability,
        tools=step.tools,
        complete=may_stand_in and parent is None and could_answer,
        parent=parent.n if parent is not None else None,
        inherits=parent is not None and step.access.user,
        declassified=written.declassified,
        why=written.why,
        why_withheld=written.why_withheld,
    )


def plan_accepted(
    proposal: int, call: str, inputs: Sequence[Sequence[int]], why: str = "", price: int | None = None
) -> PlanAccepted:
    """`call` is the planning call whose text this plan is, or empty; `inputs` count from 0. The empty plan has no
    topology. `why` is the ref of the conductor's reason for the shape; `price` is the worst case of its steps, where an
    approval may depend on it."""
    shape = ""
    if inputs:
        shape = topology(inputs)
    return PlanAccepted(proposal, call, len(inputs), shape, why, price)


def plan_rejected(
    proposal: int, call: str, reasons: Sequence[str], *, outage: bool, budget: tuple[str, float] | None = None
) -> PlanRejected:
    """Return all reasons, up to a bound. `outage` says that the conductor failed, in contrast to a bad plan; `budget`
    is the one over several runs that had not enough left for its call, with the end of its window."""
    name, until = budget or ("", None)
    return PlanRejected(proposal, call, tuple(reasons[:MOST_REASONS]), outage, budget=name, budget_until=until)


def step_taken_over(origin: str, n: int, output: str, kept_output: KeptOutput) -> StepDone:
    """Return the end of a step whose output is that of a step of the run `origin`; `output` is its ref in this run."""
    return StepDone(
        n=n,
        call="",
        output=output,
        chars=len(kept_output.text),
        finish=kept_output.finish,
        refusal=kept_output.refusal,
        origin_run=origin,
        origin_step=kept_output.step,
        origin_output=kept_output.ref,
        labels=kept_output.labels,
    )


def steps_skipped(steps: Iterable[StepState], reason: str) -> tuple[Fact, ...]:
    """Return `step.skipped` for each of the steps that is not settled."""
    return tuple(StepSkipped(step.n, reason) for step in steps if not step.settled)


def steps_settled(state: RunState, command: Skip | Conclude) -> tuple[Fact, ...]:
    """Return the end of a step that no worker executes (any more): it is skipped, has failed, or has the answer of the
    workflow nested in it, which is that of the nested step which gave it."""
    if isinstance(command, Skip):
        return steps_skipped([state.steps[command.step]], command.reason)
    if command.answer is None:
        error = command.error or RunFailed.code
        return (StepFailed(command.step, error, retry_after=_retry_after(state, error)),)
    answer = command.answer.step
    completion = StepDone(
        n=command.step,
        call=answer.call,
        output=answer.output,
        chars=answer.chars,
        finish=answer.finish,
        from_step=answer.n,
        logprobs=answer.logprobs,
        refusal=answer.refusal,
        stop_sequence=answer.stop_sequence,
    )
    return (completion,)


def run_awaiting_tool(state: RunState, command: Await, until: float) -> RunAwaitingTool:
    """Return the end of a turn with tool calls, what the turn used, and when the wait for results is over."""
    split = bill(replace(state, state="awaiting_tool"))
    return RunAwaitingTool(
        turn=state.turn.number,
        until=until,
        steps=command.steps,
        usd=split.turn_usd,
        usage=split.turn,
        visible=split.visible,
    )


def run_awaiting_approval(
    state: RunState, proposal: Proposal, until: float, seconds: float, catalog: Catalog, *, notifies: bool
) -> RunAwaitingApproval:
    """Return the question for the approval of a plan: what it is about, and when the wait is over. An approval can
    allow the workers of the run's pool as the catalog has them now."""
    question = RunAwaitingApproval(
        turn=state.turn.number,
        proposal=proposal.number,
        digest="",
        plan=digest_of(state, proposal),
        until=until,
        seconds=seconds,
        reasons=proposal.needs,
        price=proposal.price,
        workers=approvals.fingerprints(catalog, state.admitted.pool),
        catalog=catalog.digest,
        discloses=_access_by_worker(state.steps_of(proposal)),
        usd=state.usd,
        notifies=notifies,
    )
    return replace(question, digest=approvals.subject_digest(state.run, state.admitted.task, question))


def _access_by_worker(steps: Iterable[StepState]) -> dict[str, list[str | int]]:
    """Return the access of each worker of a plan that waits, over all of its steps: none of a step whose output a
    replay has taken over."""
    access_by_worker: dict[str, dict[str | int, None]] = {}
    for step in steps:
        if step.settled:
            continue
        access_by_worker.setdefault(step.worker, {}).update(dict.fromkeys(step.access.as_list()))
    return {worker: list(entries) for worker, entries in access_by_worker.items()}


def digest_of(state: RunState, proposal: Proposal) -> str:
    """Return the digest of a plan that is not carried out yet, with the refs of its instructions."""
    planned = [
        Step(step.worker, step.subtask, step.access, answers=step.answers, tools=step.tools)
        for step in state.steps_of(proposal)
    ]
    return plan_digest(planned, state.admitted.limits, proposal.base)


def plan_dropped(state: RunState, command: DropPlan, now: float) -> tuple[*tuple[Fact, ...], RunApprovalExpired]:
    """Return the end of a wait for an approval that goes on with another plan: the steps of this one are skipped, and
    the turn has the time again that it had left."""
    dropped = [step for step in state.steps.values() if step.proposal == command.proposal]
    remaining_seconds = 0.0
    if state.approval_question is not None:
        remaining_seconds = state.approval_question.seconds
    skips = steps_skipped(dropped, approvals.EXPIRED)
    return (*skips, RunApprovalExpired(command.proposal, now + remaining_seconds))


def run_resumed(turn: Turn, once: str) -> RunResumed:
    """Return the next turn as its request wants it; `once` is the id of the idempotency claim that the request makes,
    or empty."""
    return RunResumed(
        turn=turn.number,
        deadline=turn.deadline,
        streams=turn.streams,
        at=turn.at,
        request=turn.request,
        on_disconnect=turn.on_disconnect,
        wire=turn.wire,
        once=once,
        gateway=turn.gateway,
        request_id=turn.request_id,
        traceparent=turn.trace.parent,
        tracestate=turn.trace.state,
    )


def run_ended(state: RunState, command: Finish) -> RunEnd:
    """Return the terminal fact: which step answered, by the ref of its text, and what the run used."""
    make = ENDS[command.kind]
    state = replace(state, end=make(step=command.step, stopped=command.stopped))
    answer, finish, fell_back = "", None, False
    if command.step is not None:
        step = state.steps[command.step]
        answer, finish, fell_back = step.output, step.finish, command.fell_back
    split = bill(state)
    budget, budget_until = "", None
    if OVER_BUDGET in (command.error, command.stopped):
        budget, budget_until = _find_exhausted_budget(state)
    return make(
        step=command.step,
        stopped=command.stopped,
        usd=split.usd,
        usage=split.total,
        visible=split.visible,
        degraded=state.degraded,
        answer=answer,
        finish=finish,
        fell_back=fell_back,
        error=command.error,
        retry_after=_retry_after(state, command.error),
        budget=budget,
        budget_until=budget_until,
    )


def _find_exhausted_budget(state: RunState) -> tuple[str, float | None]:
    """Return the budget that had not enough left for a step or for a plan, and the end of its window."""
    for step in state.active_steps:
        if step.budget is not None:
            return step.budget
    latest_proposals = [*state.proposals[-1:]]
    latest_proposals += [tries[-1] for tries in state.nested.values()]
    for proposal in latest_proposals:
        if proposal.budget is not None:
            return proposal.budget
    return "", None


def _retry_after(state: RunState, error: str) -> float | None:
    """Return the smallest wait of the live steps that failed with that error; None if there is none."""
    waits: list[float] = []
    for step in state.active_steps:
        if step.state == "failed" and step.error == error and step.retry_after is not None:
            waits.append(step.retry_after)
    return min(waits, default=None)
