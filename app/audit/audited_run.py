"""A run as the auditor reads it: its events, sorted into admission, proposals, steps, calls and ends.

The rules read this record. The module judges nothing but the form of the events and their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from msgspec import Struct

from app.audit.bodies import wrong_field
from app.audit.report import Violation
from app.core.plan.workflow import CONDUCTOR
from app.core.run.kinds import TERMINAL, Kind
from app.store.archive import Record

KINDS_BY_NAME: Mapping[str, Kind] = {kind.value: kind for kind in Kind}
FLOOR_TOKENS = 256
"""`floor_tokens` of a run whose journal names none."""
EMBEDS = "features-1"
"""The template of an embedding of the caller's last message, or of the beginning and the end of a long one."""
FALLBACK = "fallback"
"""The name of the conductor that decides where another one did not, and the mode of its proposals."""
APPROVAL_KINDS = frozenset({Kind.AWAITING_APPROVAL, Kind.APPROVED, Kind.REFUSED, Kind.APPROVAL_EXPIRED})
WAIT_KINDS = APPROVAL_KINDS | {Kind.AWAITING, Kind.RESUMED}
SETTLING_KINDS = frozenset({Kind.STEP_DONE, Kind.STEP_FAILED, Kind.STEP_SKIPPED})


class Event(Struct, frozen=True):
    """One well-formed event."""

    seq: int
    kind: Kind
    at: float
    body: Mapping[str, Any]


@dataclass(slots=True)
class Call:
    """One provider call; `step` is None for a planning call. A faulty journal may have several outcomes of it."""

    id: str
    intent: Event
    proposal: int
    """The number of the proposal that was open when it was intended."""
    outcomes: list[Event] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Return the step that it was made for."""
        n: int | None = self.intent.body["n"]
        return n

    @property
    def outcome(self) -> Event | None:
        """Return the first outcome, which counts."""
        if not self.outcomes:
            return None
        return self.outcomes[0]

    @property
    def outcome_kind(self) -> str:
        """Return the kind of its outcome; empty if it has none yet."""
        if not self.outcomes:
            return ""
        return str(self.outcomes[0].body["outcome"])


class ToolUse(Struct, frozen=True):
    """A step's use of the caller's tools; `results` is None while the step waits for them."""

    calls: Event
    results: Event | None

    @property
    def call_ids(self) -> list[str]:
        """Return the ids by which the caller knows the calls."""
        return [str(call["id"]) for call in self.calls.body["calls"]]


@dataclass(slots=True)
class Turn:
    """The part of a run between two replies to the caller, which begins with the admission or with tool results."""

    number: int
    start: Event
    tool_calls: Event | None = None
    """Its end, if it ended with calls of the caller's tools."""
    deadline_change: Event | None = None
    """The latest event of an approval that has moved its deadline."""

    @property
    def deadline(self) -> float:
        """Return the time of its deadline, or if somebody is waited for, the time until which they are."""
        body = (self.tool_calls or self.deadline_change or self.start).body
        if "until" in body:
            return float(body["until"])
        return float(body["deadline"])


@dataclass(slots=True)
class Step:
    """A planned step with its events, in order."""

    plan: Event
    events: list[Event] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Return its number in the run."""
        return int(self.plan.body["n"])

    @property
    def is_for_conductor(self) -> bool:
        """Return True if it is given to the conductor itself, which opens a workflow for it."""
        return bool(self.plan.body["worker"] == CONDUCTOR)

    @property
    def inherits_view(self) -> bool:
        """Return True if its task is the view of the step in which it is nested."""
        return bool(self.plan.body.get("inherits"))

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return the steps on its access list."""
        return tuple(entry for entry in self.plan.body["access"] if entry != "user")

    @property
    def settlement(self) -> Event | None:
        """Return the first event that settled it, which counts."""
        for event in self.events:
            if event.kind in SETTLING_KINDS:
                return event
        return None

    def is_settled_before(self, seq: int) -> bool:
        """Return True if it was settled before this event."""
        settled = self.settlement
        return settled is not None and settled.seq < seq

    @property
    def tool_uses(self) -> list[ToolUse]:
        """Return its uses of the caller's tools, in order."""
        uses: list[ToolUse] = []
        for event in self.events:
            if event.kind is Kind.STEP_AWAITING:
                uses.append(ToolUse(event, results=None))
            elif event.kind is Kind.STEP_RESULTS and uses and uses[-1].results is None:
                uses[-1] = ToolUse(uses[-1].calls, event)
        return uses

    @property
    def completion(self) -> Event | None:
        """Return its completion, if it was settled by that."""
        settled = self.settlement
        if settled is not None and settled.kind is Kind.STEP_DONE:
            return settled
        return None

    @property
    def is_taken_over(self) -> bool:
        """Return True if a replay has taken its output over, so that its worker is not called."""
        return self.completion is not None and bool(self.completion.body.get("origin_run"))


@dataclass(slots=True)
class Proposal:
    """One proposal: its opening, its steps, and its verdicts."""

    number: int
    opening: Event
    steps: list[Step] = field(default_factory=list)
    verdicts: list[Event] = field(default_factory=list)
    approval_expiry: Event | None = None
    """The end of the wait for its approval, if it was dropped then."""

    @property
    def round(self) -> int:
        """Return the number of the workflow that it proposes."""
        return int(self.opening.body.get("round") or 1)

    @property
    def parent(self) -> int | None:
        """Return the step in which it is nested, or None."""
        n: int | None = self.opening.body.get("parent")
        return n

    @property
    def is_first_workflow(self) -> bool:
        """Return True if it is a proposal for the run's first round, not for a further round or inside a step."""
        return self.round == 1 and self.parent is None

    @property
    def answering_step(self) -> Step | None:
        """Return the step whose output is its answer: the last one with an output, or the last one if none has; None if
        the last one is not done."""
        if self.acceptance is None or not self.steps or self.steps[-1].completion is None:
            return None
        for step in reversed(self.steps):
            if step.completion is not None and step.completion.body["chars"]:
                return step
        return self.steps[-1]

    @property
    def acceptance(self) -> Event | None:
        """Return the acceptance, if that came first and was not taken back."""
        if self.approval_expiry is not None:
            return None
        if self.verdicts and self.verdicts[0].kind is Kind.PLAN_ACCEPTED:
            return self.verdicts[0]
        return None

    @property
    def rejection(self) -> Event | None:
        """Return the rejection, if that came first."""
        if self.verdicts and self.verdicts[0].kind is Kind.PLAN_REJECTED:
            return self.verdicts[0]
        return None


@dataclass(slots=True)
class AuditedRun:
    """A run, as the rules read it."""

    id: str
    record: Record
    now: float
    """When the journal was read, in seconds since 1970."""
    allows_pending: bool = True
    """True if the outcome of a call that may be in flight is not missed yet."""
    events: list[Event] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    ends: list[Event] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """At least one in a run that begins with its admission."""
    approvals: list[Event] = field(default_factory=list)
    """The questions for approvals and the decisions, in order."""
    flaws: list[Violation] = field(default_factory=list)
    """The violations that were found while sorting."""

    @property
    def has_admission(self) -> bool:
        """Return True if the journal begins with the admission. Without it no rule can be applied."""
        return bool(self.events) and self.events[0].kind is Kind.ADMITTED

    @property
    def admission(self) -> Mapping[str, Any]:
        """Return the body of `run.admitted`. The run must begin with it."""
        return self.events[0].body

    @property
    def tier_reference(self) -> tuple[str, str, str]:
        """Return its tier, the model id of its request and the subject that serves it, by which `tier_of` finds the
        tier as it was for the run."""
        body = self.admission
        return body["tier"], body["model"], str(body.get("served_by", ""))

    @property
    def limits(self) -> Mapping[str, Any]:
        """Return the limits that the run was admitted with. One that later releases have added may be left out."""
        return {"floor_tokens": FLOOR_TOKENS, **self.admission["limits"]}

    @property
    def end(self) -> Event | None:
        """Return the first terminal event, which counts."""
        return self.ends[0] if self.ends else None

    @property
    def was_ended_unread(self) -> bool:
        """Return True if it was ended, after its deadline, by older code that did not understand its journal. Such an
        end settles no step and splits no bill."""
        return self.end is not None and self.end.kind is Kind.EXPIRED and self.end.body.get("unread") is True

    def proposal(self, number: int) -> Proposal | None:
        """Return the proposal with this number; None if no such proposal was opened."""
        if 0 <= number < len(self.proposals):
            return self.proposals[number]
        return None

    def proposals_for(self, parent: int | None = None) -> Sequence[Proposal]:
        """Return the proposals that are nested in a step, or with None those for the run itself."""
        return [proposal for proposal in self.proposals if proposal.parent == parent]

    @property
    def steps_with_workflow(self) -> Sequence[Step]:
        """Return the steps for which a plan was made."""
        parents = {proposal.parent for proposal in self.proposals}
        return [step for step in self.steps.values() if step.n in parents]

    def parent_of(self, step: Step) -> Step | None:
        """Return the step in which this one is nested, or None."""
        parent = self.proposals[step.plan.body["proposal"]].parent
        if parent is not None and parent < step.n:
            return self.steps.get(parent)
        return None

    def answers_round(self, step: Step) -> bool:
        """Return True if its output is the answer of its round: it answers, and so does every step around it."""
        if not step.plan.body["answers"]:
            return False
        parent = self.parent_of(step)
        return parent is None or self.answers_round(parent)

    @property
    def planned_steps(self) -> Sequence[Step]:
        """Return the steps of every round and of the workflows nested in it, and those of the latest proposals."""
        own = self.proposals_for()
        proposals: list[Proposal] = []
        if own and own[-1].round > 1:
            proposals += [proposal for proposal in own[:-1] if proposal.acceptance is not None]
        proposals += own[-1:]
        proposals += [self.proposals_for(step.n)[-1] for step in self.steps_with_workflow]
        steps: list[Step] = []
        for proposal in proposals:
            steps += proposal.steps
        return steps

    def previous_answer(self, proposal: Proposal) -> Step | None:
        """Return the step that gave the answer of the previous round; None for a nested proposal."""
        if proposal.parent is not None:
            return None
        for earlier in reversed(self.answered_rounds):
            if earlier.round == proposal.round - 1:
                return earlier.answering_step
        return None

    @property
    def answered_rounds(self) -> Sequence[Proposal]:
        """Return the rounds that have an answer."""
        return [proposal for proposal in self.proposals_for() if proposal.answering_step is not None]

    @property
    def is_erased(self) -> bool:
        """Return True if the run's content was erased, which erases its salt as well."""
        return self.record.row["salt"] is None

    def turn_at(self, seq: int) -> Turn:
        """Return the turn in which an event was written."""
        for turn in reversed(self.turns):
            if turn.start.seq < seq:
                return turn
        return self.turns[0]

    def deadline_at(self, seq: int) -> float:
        """Return the deadline that was in force when an event was written. A decision on a plan moves it by the time
        for which the plan has waited."""
        latest = start = self.turn_at(seq).start
        for event in self.approvals:
            if "deadline" in event.body and start.seq < event.seq < seq:
                latest = event
        return float(latest.body["deadline"])

    def step_of(self, call: Call) -> Step | None:
        """Return the step for which a call was made; None for a planning call, or if the step was never planned."""
        if call.step is None:
            return None
        return self.steps.get(call.step)

    def violation(self, rule: str, seq: int, what: str) -> Violation:
        """Return a violation in this run."""
        return Violation(self.id, seq, rule, what)

    def events_of(self, *kinds: Kind) -> Iterator[Event]:
        """Yield the events of these kinds, in order."""
        return (event for event in self.events if event.kind in kinds)


def read_run(record: Record, now: float, allows_pending: bool = True) -> AuditedRun:
    """Sort the events of one run."""
    run = AuditedRun(str(record.row["id"]), record, now, allows_pending)
    _read_events(run)
    if not run.has_admission:
        run.flaws.append(run.violation("not-admitted", 1, "the journal does not begin with an admission"))
        return run
    run.turns.append(Turn(0, run.events[0]))
    for event in run.events[1:]:
        _place(run, event)
    return run


def _read_events(run: AuditedRun) -> None:
    """Read the events in the order of their numbers, each number once, and note faults of the numbers."""
    events_by_seq: dict[int, Event] = {}
    last = 0
    for stored in run.record.events:
        if stored.seq in events_by_seq or stored.seq < last:
            run.flaws.append(run.violation("seq-order", stored.seq, f"event {stored.seq} stands after event {last}"))
        elif stored.seq != last + 1:
            run.flaws.append(run.violation("seq-gap", stored.seq, f"event {stored.seq} follows event {last}"))
        last = max(stored.seq, last)
        kind = KINDS_BY_NAME.get(stored.kind)
        if kind is None:
            run.flaws.append(run.violation("unknown-kind", stored.seq, "the journal has no such kind of event"))
            continue
        try:
            body = orjson.loads(stored.body)
        except orjson.JSONDecodeError:
            body = None
        if name := wrong_field(kind, body):
            run.flaws.append(run.violation("body-malformed", stored.seq, f"{kind.value}: {name}"))
            continue
        events_by_seq.setdefault(stored.seq, Event(stored.seq, kind, stored.at, body))
    run.events = [events_by_seq[seq] for seq in sorted(events_by_seq)]


def _place(run: AuditedRun, event: Event) -> None:
    """Sort in one event. An event that has no place is a flaw."""
    kind, body = event.kind, event.body
    if kind is Kind.ADMITTED:
        run.flaws.append(run.violation("not-admitted", event.seq, "the run is admitted once more"))
    elif kind in TERMINAL:
        run.ends.append(event)
    elif kind is Kind.PLAN_OPENED:
        _place_opening(run, event)
    elif kind is Kind.PLAN_STEP:
        _place_step(run, event)
    elif kind in (Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED):
        _place_verdict(run, event)
    elif kind is Kind.CALL_INTENDED:
        _place_intent(run, event)
    elif kind is Kind.CALL_FINISHED:
        _place_outcome(run, event)
    elif kind in WAIT_KINDS:
        _place_wait(run, event)
    elif kind is not Kind.CANCEL_ASKED:
        _place_in_step(run, event, body["n"])


def _place_opening(run: AuditedRun, event: Event) -> None:
    """Add a proposal. If it is nested, its opening is also an event of the step around it."""
    run.proposals.append(Proposal(len(run.proposals), event))
    if (parent := event.body.get("parent")) is not None:
        _place_in_step(run, event, parent)


def _place_step(run: AuditedRun, event: Event) -> None:
    number = event.body["proposal"]
    if not 0 <= number < len(run.proposals):
        run.flaws.append(run.violation("plan-out-of-order", event.seq, f"proposal {number} was never opened"))
        return
    step = Step(event)
    if step.n in run.steps:
        run.flaws.append(run.violation("step-number", event.seq, f"step {step.n} is planned twice"))
        return
    run.steps[step.n] = step
    run.proposals[number].steps.append(step)


def _place_verdict(run: AuditedRun, event: Event) -> None:
    number = event.body["proposal"]
    if 0 <= number < len(run.proposals):
        run.proposals[number].verdicts.append(event)
    else:
        run.flaws.append(run.violation("plan-out-of-order", event.seq, f"proposal {number} was never opened"))


def _place_intent(run: AuditedRun, event: Event) -> None:
    name = event.body["call"]
    if name in run.calls:
        run.flaws.append(run.violation("call-twice", event.seq, f"{name} is intended again"))
        return
    run.calls[name] = Call(name, event, len(run.proposals) - 1)
    if event.body["n"] is not None:
        _place_in_step(run, event, event.body["n"])


def _place_outcome(run: AuditedRun, event: Event) -> None:
    call = run.calls.get(event.body["call"])
    if call is None:
        run.flaws.append(run.violation("outcome-without-intent", event.seq, f"nobody intended {event.body['call']}"))
        return
    if call.outcomes:
        run.flaws.append(
            run.violation("outcome-twice", event.seq, f"{call.id} had its outcome at {call.outcomes[0].seq}")
        )
    call.outcomes.append(event)


def _place_wait(run: AuditedRun, event: Event) -> None:
    """Add the beginning or the end of a wait for tool results, or for an approval."""
    if event.kind in APPROVAL_KINDS:
        _place_approval(run, event)
    else:
        _place_turn(run, event)


def _place_turn(run: AuditedRun, event: Event) -> None:
    """Add the end of a turn by tool calls, or the beginning of the next one by their results."""
    last = run.turns[-1]
    is_waiting = last.tool_calls is not None
    if event.kind is Kind.AWAITING and not is_waiting and event.body["turn"] == last.number:
        last.tool_calls = event
    elif event.kind is Kind.RESUMED and is_waiting and event.body["turn"] == last.number + 1:
        run.turns.append(Turn(last.number + 1, event))
    else:
        run.flaws.append(run.violation("turn-out-of-order", event.seq, f"{event.kind.value} in turn {last.number}"))


def _place_approval(run: AuditedRun, event: Event) -> None:
    """Add a question for an approval, or what came of it. The rules in `approvals.py` judge it."""
    number = event.body["proposal"]
    if not 0 <= number < len(run.proposals):
        run.flaws.append(run.violation("plan-out-of-order", event.seq, f"proposal {number} was never opened"))
        return
    run.approvals.append(event)
    if event.kind is not Kind.REFUSED:
        run.turns[-1].deadline_change = event
    if event.kind is Kind.APPROVAL_EXPIRED:
        run.proposals[number].approval_expiry = event


def _place_in_step(run: AuditedRun, event: Event, n: int) -> None:
    step = run.steps.get(n)
    if step is None:
        run.flaws.append(run.violation("step-unplanned", event.seq, f"step {n} was never planned"))
    else:
        step.events.append(event)
