"""The state of a run, as the fold of its journal gives it (`fold.py`): the run, its turn, plans, steps and calls.

A state is a value: it may be stored, and it stays true of the prefix of the journal that it was folded from. It holds
refs, ids and figures, never text. Its properties answer what others ask of it, such as the steps of the present round.
The states and their arrows are drawn in `kinds.py`; `progress.py` decides what a run does next.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from msgspec import Struct

from app.core.message.chat import Usage
from app.core.plan.workflow import CONDUCTOR, Access
from app.core.run.approvals import Approval
from app.core.run.events import RunAdmitted, RunAwaitingApproval, RunEnd
from app.core.run.identifiers import NO_TRACE, Trace
from app.core.run.kinds import ENDED, REPLIED, WAITING, Mode, OnDisconnect
from app.errors import WorkerRateLimited

RATE_LIMITED = WorkerRateLimited.code
"""The error of a call that its provider refused because of a rate limit, and of a run all of whose workers' did."""
FALLBACK = "fallback"
"""The conductor's name where one worker answers alone: no conductor may read the task, or none gave a usable plan."""
CALLER = "caller"
"""The conductor's name where the request brought its own plan."""
NO_RESULTS = "tool_results_missing"
"""The error of a run whose caller did not come back with tool results in time."""
RUN_ENDED = "run_ended"
"""The reason for which steps that are not settled are skipped at the end of their run."""
ROUND_OVER = "round_over"
"""The reason for which steps are skipped at the end of a round whose answer did not need them."""
REPLAY = "replay"
"""The conductor's name where the plans are those of an earlier run."""


# -- the records


class Exchange(Struct, frozen=True):
    """One use of the caller's tools by a step: the worker's message with its calls, and the results."""

    call: str
    worker: str
    message: str
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


class Call(Struct, frozen=True):
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
    """True if it gave an empty answer (`CallFinished.is_empty_answer`)."""
    out_of_time: bool = False
    """True if its text is cut off because the time of the run was over."""

    @property
    def failed(self) -> bool:
        """Return True if it has ended without an answer: what was streamed of it is no part of any answer."""
        return self.outcome not in (None, "ok")


class Turn(Struct, frozen=True):
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
    wire: Mapping[str, Any] = {}
    """The wire format of the reply and the request's options for it."""
    until: float = 0.0
    """When the wait for tool results is over; 0 before there is any."""
    gateway: str = ""
    """The address of the gateway that the request came to, and that follows the turn; empty where nobody does."""
    request_id: str = ""
    """The id of the HTTP request; empty where it is not known."""
    trace: Trace = NO_TRACE
    """The span of the request."""

    @property
    def seconds(self) -> float:
        """Return the seconds from its beginning to its deadline."""
        return round(self.deadline - self.at, 3)


class StepState(Struct, frozen=True):
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


class Proposal(Struct, frozen=True):
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


class Answer(Struct, frozen=True):
    """The answer of a round: the step whose output it is. `fell_back` is true if that is not the last step, whose
    output was empty."""

    step: StepState
    fell_back: bool


class RunState(Struct, frozen=True):
    """The state of one run after the events up to `seq`."""

    run: str
    admitted: RunAdmitted
    turn: Turn
    seq: int = 0
    state: str = "admitted"
    proposals: tuple[Proposal, ...] = ()
    """The proposals for workflows of the run's own, not for nested ones."""
    steps: Mapping[int, StepState] = {}
    calls: Mapping[str, Call] = {}
    cancel_asked: bool = False
    end: RunEnd | None = None
    """The terminal fact."""
    replied_at: float = 0.0
    """When the latest reply was complete, in seconds since 1970; 0 before there is one."""
    nested: Mapping[int, tuple[Proposal, ...]] = {}
    """The proposals for each step that the conductor itself has taken. What reads `steps` alone sees all of them."""
    approvals: Mapping[int, Approval] = {}
    """The approvals that were given, by the number of the proposal; the last one comes last."""
    approval_question: RunAwaitingApproval | None = None
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
        return self.state in REPLIED

    @property
    def is_waiting(self) -> bool:
        """Return True if somebody outside has to move the run: it waits for tool results, or for an approval."""
        return self.state in WAITING

    @property
    def is_recorded_replay(self) -> bool:
        """Return True if the run repeats another one, and has a recording of it."""
        return self.admitted.origin_kind == "replay" and bool(self.admitted.plan)

    @property
    def awaits_approval(self) -> Proposal | None:
        """Return the first accepted plan that needs an approval and has none."""
        if self.admitted.approval is None:
            return None
        return next((proposal for proposal in self.all_proposals if proposal.needs and self.is_gated(proposal)), None)

    def is_gated(self, proposal: Proposal) -> bool:
        """Return True if no step of a proposal may begin, because the run has terms of approval and the plan is not
        accepted yet, or needs an approval that it does not have."""
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
        last = self.proposals[-1].number if self.proposals else None
        return tuple([step for step in self.steps.values() if step.proposal == last])

    def steps_of(self, proposal: Proposal) -> tuple[StepState, ...]:
        """Return the steps of a proposal, in order."""
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
        last = self.proposal
        return last is not None and last.state == "accepted"

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
        last = self.proposal
        if last is None:
            return 1
        return last.round

    @property
    def is_last_round(self) -> bool:
        """Return True if no other round may follow, so that the answer of the present one is the run's."""
        last = self.proposal
        return last is None or last.round >= self.admitted.limits.rounds or last.mode == "fallback"

    def steps_of_round(self, number: int) -> tuple[StepState, ...]:
        """Return the steps of a round's workflow; none before it is accepted."""
        accepted: set[int] = set()
        for proposal in self.proposals:
            if proposal.round == number and proposal.state == "accepted":
                accepted.add(proposal.number)
        return tuple(step for step in self.steps.values() if step.proposal in accepted)

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
        numbers: set[int] = {tries[-1].number for tries in self.nested.values()}
        for proposal in self.proposals:
            if proposal.state == "accepted" or proposal is self.proposals[-1]:
                numbers.add(proposal.number)
        return tuple(step for step in self.steps.values() if step.proposal in numbers)

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """Return the calls that are intended and have no outcome."""
        return tuple(call for call in self.calls.values() if call.outcome is None)

    @property
    def open_planning_calls(self) -> tuple[Call, ...]:
        """Return the open calls that were made for a plan."""
        return tuple(call for call in self.open_calls if call.step is None)

    @property
    def degraded(self) -> bool:
        """Return True if a fallback decided, a step failed, the last round has no answer, or a text is cut off because
        time was over. Steps that were skipped because the run or their round had ended do not count."""
        last = self.proposal
        if self.end is not None and self.end.stopped:
            return True
        if last is not None and (last.mode == "fallback" or last.conductor == FALLBACK):
            return True
        if any(tries[-1].mode == "fallback" for tries in self.nested.values()):
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

    def find_proposal(self, number: int) -> Proposal:
        """Return the proposal of this number, for a workflow of the run's own or a nested one."""
        return next(proposal for proposal in self.all_proposals if proposal.number == number)


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
