"""The state of a run, and the fold of its journal into it (D2): `advance(state, event) -> state`.

A state is a value: it may be stored, and it stays true of the prefix of the journal that it was folded from. It holds
refs, ids and figures, never text. `advance` is pure, believes the journal, ignores events that it has already folded,
and needs them in order of `seq`. The states and their arrows are drawn in `kinds.py`; `progress.py` decides what a run
does next.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from typing import Any, Literal

from app.core.message.chat import Usage
from app.core.plan.workflow import CONDUCTOR, Access
from app.core.records import copy_with, record
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
    read,
)
from app.core.run.identifiers import NO_TRACE, Trace
from app.core.run.kinds import (
    AFTER_THE_END,
    ENDED,
    RUN_ARROWS,
    STEP_ARROWS,
    TERMINAL,
    WAITING,
    Kind,
    Mode,
    OnDisconnect,
)

RATE_LIMITED = "worker_rate_limited"
FALLBACK = "fallback"
"""The mode of a proposal that nobody conducted, and its conductor's name where no conductor may read the task."""
CALLER = "caller"
"""The conductor's name where the request brought its own plan."""
NO_RESULTS = "tool_results_missing"
"""The error of a run whose caller did not come back with tool results in time."""
RUN_ENDED = "run_ended"
"""Reasons for which steps that were not settled are skipped at the end of their run."""
ROUND_OVER = "round_over"
"""The reason for which steps are skipped at the end of a round whose answer did not need them."""
REPLAY = "replay"
"""The conductor's name where the plans are those of an earlier run."""
DRIVER_LOST = "the driver was lost while the plan was made"
"""The reason of a proposal that is made again because nobody is left to finish it."""


# -- the records


@record(frozen=True, slots=True)
class Exchange:
    """One use of the caller's tools by a step: the worker's message with its calls, and the results."""

    call: str
    worker: str
    said: str
    """Ref of the message, with the ids that the worker knows its calls by."""
    ids: tuple[str, ...]
    """The ids that the caller knows them by, in the same order."""
    turn: int
    """The turn that ended with them."""
    chars: int = 0
    """Of the text beside the calls."""
    results: str = ""
    """Ref of what came back; empty while it is awaited."""
    labels: frozenset[str] = frozenset()
    """The labels that the caller put on what came back."""


@record(frozen=True, slots=True)
class Call:
    """One attempt, or one planning call (`step` is None). `outcome` is None while it is only intended."""

    id: str
    step: int | None
    worker: str
    sees_user: bool
    usd_held: int
    tokens_held: int
    outcome: str | None = None
    usage: Usage = Usage()
    usd: int = 0
    seconds: float = 0.0
    turn: int = 0
    """The turn in which it was intended."""
    limited: bool = False
    """True if its provider refused it because of a rate limit."""
    empty: bool = False
    """True if it went well and has no text. It may have called tools."""
    out_of_time: bool = False
    """True if its text is cut off because the time of the run was over."""

    @property
    def failed(self) -> bool:
        """Return True if it has ended without an answer: what was streamed of it is no part of any answer."""
        return self.outcome not in (None, "ok")


@record(frozen=True, slots=True)
class Turn:
    """The caller's latest request to this run: the admission (number 0), or one that brought tool results."""

    number: int = 0
    deadline: float = 0.0
    streams: bool = False
    """True if deltas of the answer are sent as they come; then a step that has begun to answer is not tried again."""
    request: str = ""
    """Ref of its sampling and tools; empty: those of the task."""
    at: float = 0.0
    """When, in seconds since 1970."""
    on_disconnect: OnDisconnect = "cancel"
    wire: Mapping[str, Any] = field(default_factory=dict)
    """The wire format of the reply and the request's options for it."""
    until: float = 0.0
    """When the wait for tool results is over; 0 before there is any."""
    gateway: str = ""
    """The address of the gateway that the request came to, and that follows the turn; empty where nobody does."""
    request_id: str = ""
    """The id of the HTTP request; empty where it is not known."""
    trace: Trace = NO_TRACE
    """The span of the request."""


@record(frozen=True, slots=True)
class StepState:
    """A step of some proposal. `output` is the ref of its answer; `subtask` and `logprobs` are refs too, or empty."""

    n: int
    proposal: int
    worker: str
    subtask: str
    access: Access
    answers: bool
    state: str = "waiting"
    output: str = ""
    chars: int = 0
    finish: str = ""
    call: str = ""
    error: str = ""
    retry_after: float | None = None
    """Seconds after which a step that failed because of rate limits could be tried again."""
    logprobs: str = ""
    refusal: bool = False
    """True if its output is the model's refusal."""
    stop_sequence: int | None = None
    """The place, among those of the request, of the stop sequence that ended its output, where that is known."""
    tools: bool = False
    """True if it may call the caller's tools; the answering step always may."""
    exchanges: tuple[Exchange, ...] = ()
    inherits: bool = False
    """True if its plan listed `user`, which inside a step is the parent's task."""
    complete: bool = False
    """True if it sees the conversation and is asked for the whole answer although another step answers: its output may
    stand in for an answer that the run has no money or time for."""
    budget: tuple[str, float] | None = None
    """The budget that had not enough left for its call, and the end of that budget's window."""
    subtask_lost: frozenset[str] = frozenset()
    output_lost: frozenset[str] = frozenset()
    """The labels that its subtask and its output lost, because those who wrote them declassify these labels."""
    origin_labels: frozenset[str] | None = None
    """The labels of an output that was taken over from an earlier run; None where a call gave it."""

    @property
    def opens_workflow(self) -> bool:
        """Return True if the conductor itself takes the step and opens a workflow for it."""
        return self.worker == CONDUCTOR

    @property
    def settled(self) -> bool:
        """Return True if the step is done, failed or skipped, so that nothing more happens to it."""
        return self.state in ("done", "failed", "skipped")


@record(frozen=True, slots=True)
class Proposal:
    """One answer of a conductor. Its steps are numbered from `base`."""

    number: int
    base: int
    mode: Mode
    conductor: str
    state: Literal["open", "accepted", "rejected"] = "open"
    outage: bool = False
    reasons: tuple[str, ...] = ()
    budget: tuple[str, float] | None = None
    """The budget over several runs that had not enough left for its call, and the end of that budget's window."""
    call: str = ""
    topology: str = ""
    """Empty until it is accepted, and for the empty plan that takes the answer before it for final."""
    round: int = 1
    """The number of the workflow that it is to become, or is nested in."""
    parent: int | None = None
    """The step that it is nested in."""
    room: int = 0
    """The largest number of its steps; 0 means the number in the limits."""
    instant: bool = False
    """True if no model wrote it."""
    waits: bool = False
    """True if no step of it begins before it is accepted."""
    needs: tuple[str, ...] = ()
    """The reasons why it needs an approval; known once it is accepted."""
    price: int | None = None
    """The worst case of its steps in micro-dollars, where that is known."""


@record(frozen=True, slots=True)
class Answer:
    """The answer of a round: the step whose output it is. `fell_back` is true if that is not the last step, whose
    output was empty."""

    step: StepState
    fell_back: bool


@record(frozen=True, slots=True)
class RunState:
    """The state of one run after the events up to `seq`."""

    run: str
    admitted: RunAdmitted
    turn: Turn
    seq: int = 0
    state: str = "admitted"
    proposals: tuple[Proposal, ...] = ()
    """The proposals for workflows of the run's own, not for nested ones."""
    steps: Mapping[int, StepState] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)
    cancel_asked: bool = False
    end: RunEnd | None = None
    """The terminal fact."""
    replied_at: float = 0.0
    """When the latest reply was complete, in seconds since 1970; 0 before there is one."""
    nested: Mapping[int, tuple[Proposal, ...]] = field(default_factory=dict)
    """The proposals for each step that the conductor itself has taken. What reads `steps` alone sees all of them."""
    approvals: Mapping[int, Approval] = field(default_factory=dict)
    """The approvals that were given, by the number of the proposal; the last one comes last."""
    asked: RunAwaitingApproval | None = None
    """The latest question for an approval."""
    refused: bool = False
    """True if a plan of the run was refused."""

    @property
    def ended(self) -> bool:
        """Return True if the run has reached a terminal state."""
        return self.state in ENDED

    @property
    def replied(self) -> bool:
        """Return True if the reply of the present turn is complete: the run has ended, or waits for the caller."""
        return self.ended or self.is_waiting

    @property
    def is_waiting(self) -> bool:
        """Return True if somebody outside has to move the run: it waits for tool results, or for an approval."""
        return self.state in WAITING

    @property
    def awaits_approval(self) -> Proposal | None:
        """Return the first accepted plan that needs an approval and has none."""
        if self.admitted.approval is None:
            return None
        return next((proposal for proposal in self.all_proposals if proposal.needs and self.is_gated(proposal)), None)

    def is_gated(self, proposal: Proposal) -> bool:
        """True if no step of a proposal may begin, because the run has terms of approval and the plan is not accepted
        yet, or needs an approval that it does not have."""
        if self.admitted.approval is None or proposal.state == "rejected":
            return False
        return proposal.state == "open" or (bool(proposal.needs) and proposal.number not in self.approvals)

    @property
    def unanswered_tool_calls(self) -> Mapping[str, int]:
        """Return the ids of tool calls that a caller was given and has not answered yet, each with its step."""
        waiting = [step for step in self.steps.values() if step.state == "awaiting_tool"]
        return {id_: step.n for step in waiting for id_ in step.exchanges[-1].ids}

    @property
    def proposal(self) -> Proposal | None:
        """Return the latest proposal for a workflow of the run's own."""
        if not self.proposals:
            return None
        return self.proposals[-1]

    @property
    def current_steps(self) -> tuple[StepState, ...]:
        """Return the steps of the latest proposal for a workflow of the run's own, in order."""
        if len(self.proposals) == 1 and not self.nested:
            return tuple(self.steps.values())
        last = self.proposals[-1].number if self.proposals else None
        return tuple([step for step in self.steps.values() if step.proposal == last])

    def steps_of(self, proposal: Proposal) -> tuple[StepState, ...]:
        """The steps of a proposal, in order."""
        return tuple(step for step in self.steps.values() if step.proposal == proposal.number)

    @property
    def open_proposal(self) -> Proposal | None:
        """Return the one proposal that is being made, if there is one."""
        last = self.proposal
        if last is not None and last.state == "open":
            return last
        return next((tries[-1] for tries in self.nested.values() if tries[-1].state == "open"), None)

    @property
    def has_workflow(self) -> bool:
        """Return True if there is a workflow to execute."""
        return self.proposal is not None and self.proposal.state == "accepted"

    @property
    def answering_step(self) -> StepState | None:
        """Return the step whose output is the present round's answer; known once a proposal is accepted, and none if it
        is the empty plan."""
        steps = self.current_steps if self.has_workflow else ()
        if steps:
            return steps[-1]
        return None

    @property
    def round(self) -> int:
        """Return the number of the present round."""
        if self.proposal is None:
            return 1
        return self.proposal.round

    @property
    def is_last_round(self) -> bool:
        """Return True if no other round may follow, so that the answer of the present one is the run's."""
        last = self.proposal
        return last is None or last.round >= self.admitted.limits.rounds or last.mode == FALLBACK

    def steps_of_round(self, number: int) -> tuple[StepState, ...]:
        """The steps of a round's workflow; none before it is accepted."""
        chosen = [
            proposal.number for proposal in self.proposals if proposal.round == number and proposal.state == "accepted"
        ]
        return tuple(step for step in self.steps.values() if step.proposal in chosen)

    def answer_of_round(self, number: int) -> Answer | None:
        """Return the answer of a round; None if its answering step is not done."""
        return answer_of(self.steps_of_round(number))

    @property
    def previous_answer(self) -> Answer | None:
        """Return the answer of the round before the present one."""
        if self.round > 1:
            return self.answer_of_round(self.round - 1)
        return None

    @property
    def round_count(self) -> int:
        """Return the number of workflows."""
        return sum(bool(proposal.topology) for proposal in self.proposals)

    @property
    def topology(self) -> str:
        """Return the topology of the latest workflow; empty before there is one."""
        return next((proposal.topology for proposal in reversed(self.proposals) if proposal.topology), "")

    @property
    def planned_steps(self) -> tuple[StepState, ...]:
        """Return the steps of all rounds, and of what is nested in them; not those of proposals that were replaced."""
        if self.round == 1 and not self.nested:
            return self.current_steps
        kept: set[int] = {tries[-1].number for tries in self.nested.values()}
        for proposal in self.proposals:
            if proposal.state == "accepted" or proposal is self.proposals[-1]:
                kept.add(proposal.number)
        return tuple(step for step in self.steps.values() if step.proposal in kept)

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """Calls that are intended and have no outcome."""
        return tuple(call for call in self.calls.values() if call.outcome is None)

    @property
    def open_planning_calls(self) -> tuple[Call, ...]:
        """Open calls that were made for a plan."""
        return tuple(call for call in self.open_calls if call.step is None)

    @property
    def degraded(self) -> bool:
        """Return True if a fallback decided, a step failed, the last round has no answer, or a text is cut off because
        time was over. Steps that were skipped because the run or their round had ended do not count."""
        last = self.proposal
        if self.end is not None and self.end.stopped:
            return True
        if last is not None and FALLBACK in (last.mode, last.conductor):
            return True
        if any(tries[-1].mode == FALLBACK for tries in self.nested.values()):
            return True
        if any(call.out_of_time for call in self.calls.values()):
            return True
        for step in self.planned_steps:
            not_needed = step.error in (RUN_ENDED, ROUND_OVER)
            if step.state in ("failed", "skipped") and not not_needed:
                return True
        return False

    @property
    def usd(self) -> int:
        """Return the micro-dollars of all finished calls."""
        return sum(call.usd for call in self.calls.values())

    # -- what is nested

    @property
    def proposal_count(self) -> int:
        """Return the number of all proposals."""
        return len(self.proposals) + sum(map(len, self.nested.values()))

    @property
    def active_steps(self) -> tuple[StepState, ...]:
        """Return the steps of the present round, and of what is nested in them."""
        active = inner = self.current_steps
        while inner and self.nested:
            nested: list[StepState] = []
            for step in inner:
                if step.n in self.nested:
                    nested += self.steps_of(self.nested[step.n][-1])
            inner = tuple(nested)
            active += inner
        return active

    @property
    def all_proposals(self) -> tuple[Proposal, ...]:
        """Return the proposals of the run's own workflows and of nested ones, in the order of their numbers."""
        if not self.nested:
            return self.proposals
        proposals = list(self.proposals)
        for tries in self.nested.values():
            proposals += tries
        return tuple(sorted(proposals, key=lambda proposal: proposal.number))


def answer_of(steps: Sequence[StepState]) -> Answer | None:
    """Return the answer of a workflow; None if its answering step is not done.

    If the output of the answering step is empty, the last output that is not empty takes its place (DESIGN, section 4).
    If the answering step failed, no other output does: an earlier step has written a plan or a draft, and an outage
    would pass for an answer.
    """
    if not steps or steps[-1].state != "done":
        return None
    for step in reversed(steps):
        if step.state == "done" and step.chars:
            return Answer(step, fell_back=step is not steps[-1])
    return Answer(steps[-1], fell_back=False)


# -- the fold


def begin(event: Event) -> RunState:
    """The state after a run's first event. Raises ValueError if that admits no run."""
    return state_of_admission(event.run, event.fact, event.at, event.seq)


def state_of_admission(run: str, fact: Fact, at: float, seq: int) -> RunState:
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
        request_id=fact.request_id,
        trace=fact.trace,
    )
    return RunState(run=run, admitted=fact, turn=turn, seq=seq)


def fold(events: tuple[Event, ...], before: RunState | None = None) -> RunState:
    """The state that a journal stands for, given from its first event, or from the first one that `before` lacks."""
    state = before if before is not None else begin(events[0])
    for seq, at, fact in read(events):
        state = _advance_in_order(state, seq, at, fact)
    return state


def fold_turn(state: RunState, events: Iterable[Event]) -> RunState:
    """Return the state after these events, but for those behind the reply of the present turn."""
    for seq, at, fact in read(events):
        if state.replied:
            break
        state = _advance_in_order(state, seq, at, fact)
    return state


def advance(state: RunState, event: Event) -> RunState:
    """The state after one more event; one that was folded before changes nothing.

    Raises ValueError for a gap, and for an arrow that `kinds.py` does not draw.
    """
    return _advance_in_order(state, event.seq, event.at, event.fact)


def _advance_in_order(state: RunState, seq: int, at: float, fact: Fact) -> RunState:
    if seq <= state.seq:
        return state
    if seq != state.seq + 1:
        raise ValueError(f"event {seq} does not follow event {state.seq}")
    return apply_fact(state, fact, at)


def apply_fact(state: RunState, fact: Fact, at: float) -> RunState:
    """The state after one more fact, whose event has the next number. Raises ValueError as `advance` does."""
    seq = state.seq + 1
    if isinstance(fact, RunEnd):
        ended = _check_run_arrow(state, TERMINAL[fact.kind])
        return _copy_with(state, seq, {"state": ended, "end": fact, "replied_at": at})
    if state.ended and fact.kind not in AFTER_THE_END:
        raise ValueError(f"{fact.kind} comes after the run's end")
    changes = _CHANGES_BY_KIND[fact.kind](state, fact)
    if fact.kind is Kind.AWAITING:
        changes["replied_at"] = at
    return _copy_with(state, seq, changes)


def apply_facts(state: RunState, facts: Iterable[Fact]) -> RunState:
    """The state as it would be if these were committed next."""
    for fact in facts:
        state = apply_fact(state, fact, at=0.0)
    return state


def apply_facts_if_possible(state: RunState, facts: Iterable[Fact]) -> RunState | None:
    """The tentative state, or None if `state` lacks the events that these follow."""
    try:
        return apply_facts(state, facts)
    except (KeyError, ValueError):
        return None


Changes = dict[str, Any]
"""Fields of `RunState` with their new values."""


def _copy_with(state: RunState, seq: int, changes: Changes) -> RunState:
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
        take("approvals", state.approvals),
        take("asked", state.asked),
        take("refused", state.refused),
    )


def _cancel_asked(_state: RunState, _fact: RunCancelAsked) -> Changes:
    return {"cancel_asked": True}


def _plan_opened(state: RunState, fact: PlanOpened) -> Changes:
    if fact.parent is not None:
        return _nested_opened(state, fact, fact.parent)
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


def _nested_opened(state: RunState, fact: PlanOpened, n: int) -> Changes:
    """The step runs from then on: it is the conductor's, so nobody has a ticket for it."""
    parent = state.steps[n]
    tries = state.nested.get(parent.n, ())
    expected_state = "running" if tries else "waiting"
    if state.open_proposal is not None or not parent.opens_workflow or parent.state != expected_state:
        raise ValueError(f"a plan is opened for step {parent.n}, which does not wait for one")
    if tries and tries[-1].state != "rejected":
        raise ValueError("a plan is opened while there is another one")
    changes: Changes = {"nested": {**state.nested, parent.n: (*tries, _proposal(fact))}}
    changes["steps"] = {**state.steps, parent.n: copy_with(parent, state="running")}
    if state.state == "planned":
        return changes | {"state": "running"}
    return changes


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
        complete=fact.complete,
        inherits=fact.inherits,
        subtask_lost=fact.declassified,
    )
    if step.n in state.steps:
        raise ValueError(f"step {step.n} is planned twice")
    return {"steps": {**state.steps, step.n: step}}


def _plan_accepted(state: RunState, fact: PlanAccepted) -> Changes:
    accepted = copy_with(_open_proposal(state), state="accepted", call=fact.call, topology=fact.topology)
    if state.admitted.approval is not None:
        accepted = copy_with(accepted, needs=_approval_reasons(state, accepted, fact.price), price=fact.price)
    changes = _replace_latest_proposal(state, accepted)
    if accepted.round > 1 or accepted.parent is not None:
        return changes
    started = any(step.state != "waiting" for step in state.current_steps)
    return changes | {"state": _check_run_arrow(state, "running" if started else "planned")}


def _plan_rejected(state: RunState, fact: PlanRejected) -> Changes:
    rejected = copy_with(
        _open_proposal(state),
        state="rejected",
        outage=fact.outage,
        reasons=fact.reasons,
        budget=(fact.budget, fact.budget_until) if fact.budget_until is not None else None,
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


def _step_queued(state: RunState, fact: StepQueued) -> Changes:
    _check_approved(state, fact.n)
    changes = _set_step(state, fact.n, state="queued")
    if state.state == "planned":
        return changes | {"state": "running"}
    return changes


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
    if call.step is not None:
        _check_approved(state, call.step)
    if call.step is None:
        return changes
    return changes | _set_step(state, call.step, state="running", worker=call.worker)


def _call_finished(state: RunState, fact: CallFinished) -> Changes:
    known = state.calls[fact.call]
    if known.outcome is not None:
        raise ValueError(f"{known.id} has its outcome already")
    limited = fact.error == RATE_LIMITED
    empty = fact.outcome == "ok" and not fact.output
    settled = copy_with(known, outcome=fact.outcome, usage=fact.usage, usd=fact.usd, seconds=fact.seconds)
    unusual = limited or empty or fact.out_of_time
    call = copy_with(settled, limited=limited, empty=empty, out_of_time=fact.out_of_time) if unusual else settled
    return {"calls": {**state.calls, call.id: call}}


def _step_awaiting(state: RunState, fact: StepAwaitingTool) -> Changes:
    step = state.steps[fact.n]
    ids = tuple(call.id for call in fact.calls)
    exchange = Exchange(fact.call, step.worker, fact.said, ids, state.turn.number, chars=fact.chars)
    return _set_step(state, step.n, state="awaiting_tool", exchanges=(*step.exchanges, exchange))


def _step_results(state: RunState, fact: StepToolResults) -> Changes:
    step = state.steps[fact.n]
    if state.state != "running" or (not step.settled and step.state != "awaiting_tool"):
        raise ValueError(f"step {step.n} waits for no results")
    answered = copy_with(step.exchanges[-1], results=fact.results, labels=fact.labels)
    return _set_step(state, step.n, state="running", exchanges=(*step.exchanges[:-1], answered))


def _awaiting(state: RunState, fact: RunAwaitingTool) -> Changes:
    return {"state": _check_run_arrow(state, "awaiting_tool"), "turn": copy_with(state.turn, until=fact.until)}


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
        request_id=fact.request_id,
        trace=fact.trace,
    )
    return {"state": _check_run_arrow(state, "running"), "turn": turn}


def _awaiting_approval(state: RunState, fact: RunAwaitingApproval) -> Changes:
    wanted = state.awaits_approval
    if wanted is None or wanted.number != fact.proposal:
        raise ValueError(f"plan {fact.proposal} waits for no approval")
    turn = copy_with(state.turn, until=fact.until)
    return {"state": _check_run_arrow(state, "awaiting_approval"), "turn": turn, "asked": fact}


def _approved(state: RunState, fact: RunApproved) -> Changes:
    """The turn goes on, with the time that it had left."""
    _check_approval_question(state, fact.proposal, fact.digest)
    given = Approval(fact.digest, fact.workers, fact.max_usd)
    turn = copy_with(state.turn, deadline=fact.deadline)
    approved = {**state.approvals, fact.proposal: given}
    return {"state": _check_run_arrow(state, "running"), "turn": turn, "approvals": approved}


def _refused(state: RunState, fact: RunRefused) -> Changes:
    """The run waits on until its end is written, which the same entry brings as a rule."""
    _check_approval_question(state, fact.proposal, fact.digest)
    return {"refused": True}


def _approval_expired(state: RunState, fact: RunApprovalExpired) -> Changes:
    """The plan is dropped. A first round begins anew; what has answered or runs already stays as it is."""
    asked = _check_approval_question(state, fact.proposal, None)
    dropped = next(proposal for proposal in state.all_proposals if proposal.number == asked.proposal)
    dropped = copy_with(dropped, state="rejected", reasons=(approvals.EXPIRED,), topology="")
    first = dropped.round == 1 and dropped.parent is None
    after = _check_run_arrow(state, "admitted" if first else "running")
    return _replace_latest_proposal(state, dropped) | {
        "state": after,
        "turn": copy_with(state.turn, deadline=fact.deadline),
    }


def _check_approval_question(state: RunState, proposal: int, digest: str | None) -> RunAwaitingApproval:
    """The present question for an approval. Raises ValueError if there is none, or another one."""
    asked = state.asked
    if state.state != "awaiting_approval" or asked is None or state.refused:
        raise ValueError("the run waits for no approval")
    if asked.proposal != proposal or digest not in (None, asked.digest):
        raise ValueError("another plan waits for an approval")
    return asked


def _step_done(state: RunState, fact: StepDone) -> Changes:
    if state.steps[fact.n].state == "waiting" and not fact.origin_run:
        raise ValueError(f"step {fact.n} was not called, and its output is of no earlier run")
    said = {"output": fact.output, "chars": fact.chars, "logprobs": fact.logprobs, "refusal": fact.refusal}
    ended = {"call": fact.call, "finish": fact.finish, "stop_sequence": fact.stop_sequence}
    labels = fact.labels if fact.origin_run else None
    return _set_step(state, fact.n, state="done", **said, **ended, output_lost=fact.declassified, origin_labels=labels)


def _step_failed(state: RunState, fact: StepFailed) -> Changes:
    budget = (fact.budget, fact.budget_until) if fact.budget_until is not None else None
    return _set_step(state, fact.n, state="failed", error=fact.error, retry_after=fact.retry_after, budget=budget)


def _step_skipped(state: RunState, fact: StepSkipped) -> Changes:
    return _set_step(state, fact.n, state="skipped", error=fact.reason)


def _set_step(run: RunState, n: int, /, *, state: str, **changes: Any) -> Changes:
    step = run.steps[n]
    if step.settled:
        return {}
    again = state == step.state == "running"  # another attempt
    if state not in STEP_ARROWS[step.state] and not again:
        raise ValueError(f"step {n} cannot go from {step.state} to {state}")
    return {"steps": {**run.steps, n: copy_with(step, state=state, **changes)}}


def _check_run_arrow(run: RunState, to: str) -> str:
    if to not in RUN_ARROWS[run.state]:
        raise ValueError(f"the run cannot go from {run.state} to {to}")
    return to


def _open_proposal(state: RunState) -> Proposal:
    if (unmade := state.open_proposal) is None:
        raise ValueError("no plan is open")
    return unmade


def _admitted(state: RunState, _fact: RunAdmitted) -> Changes:
    if state.seq:
        raise ValueError("a run is admitted once")
    return {}


_CHANGES_BY_KIND: Mapping[Kind, Callable[[RunState, Any], Changes]] = {
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
    Kind.AWAITING_APPROVAL: _awaiting_approval,
    Kind.APPROVED: _approved,
    Kind.REFUSED: _refused,
    Kind.APPROVAL_EXPIRED: _approval_expired,
}
