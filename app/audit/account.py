"""The account of a run: its events, sorted into admission, proposals, steps, calls and ends.

The rules read it. This module judges nothing but the form of events and their order.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

from app.audit.bodies import faulty
from app.audit.report import Violation
from app.core.plan.workflow import CONDUCTOR
from app.core.run.kinds import TERMINAL, Kind
from app.store.archive import Record

KINDS: Mapping[str, Kind] = {kind.value: kind for kind in Kind}
FLOOR_TOKENS = 256
"""`floor_tokens` of a run whose journal names none."""
APPROVALS = frozenset({Kind.AWAITING_APPROVAL, Kind.APPROVED, Kind.REFUSED, Kind.APPROVAL_EXPIRED})
WAITS = APPROVALS | {Kind.AWAITING, Kind.RESUMED}
SETTLING = frozenset({Kind.STEP_DONE, Kind.STEP_FAILED, Kind.STEP_SKIPPED})


@dataclass(frozen=True, slots=True)
class Fact:
    """One well-formed event."""

    seq: int
    kind: Kind
    at: float
    body: Mapping[str, Any]


@dataclass(slots=True)
class Call:
    """One provider call; `step` is None for a planning call. A faulty journal may have several outcomes of it."""

    id: str
    intent: Fact
    proposal: int
    """The number of the proposal that was open when it was intended."""
    outcomes: list[Fact] = field(default_factory=list)

    @property
    def step(self) -> int | None:
        """Return the step that it was made for."""
        n: int | None = self.intent.body["n"]
        return n

    @property
    def outcome(self) -> Fact | None:
        """Return the first outcome, which counts."""
        if not self.outcomes:
            return None
        return self.outcomes[0]

    @property
    def went(self) -> str:
        """Return the kind of its outcome; empty if it has none yet."""
        if not self.outcomes:
            return ""
        return str(self.outcomes[0].body["outcome"])


@dataclass(frozen=True, slots=True)
class Exchange:
    """A step's use of the caller's tools; `results` is None while the step waits for them."""

    awaiting: Fact
    results: Fact | None

    @property
    def ids(self) -> list[str]:
        """Return the ids by which the caller knows the calls."""
        return [str(call["id"]) for call in self.awaiting.body["calls"]]


@dataclass(slots=True)
class Turn:
    """The part of a run between two replies to the caller, which begins with the admission or with tool results."""

    number: int
    began: Fact
    awaiting: Fact | None = None
    """Its end, if it ended with calls of the caller's tools."""
    moved: Fact | None = None
    """The latest event of an approval that has moved its deadline."""

    @property
    def until(self) -> float:
        """Return the time of its deadline, or if somebody is waited for, the time until which they are."""
        latest = self.awaiting or self.moved or self.began
        return float(latest.body["until"] if "until" in latest.body else latest.body["deadline"])


@dataclass(slots=True)
class Step:
    """A planned step with its events, in order."""

    plan: Fact
    facts: list[Fact] = field(default_factory=list)

    @property
    def n(self) -> int:
        """Return its number in the run."""
        return int(self.plan.body["n"])

    @property
    def opens(self) -> bool:
        """Return True if it is given to the conductor itself, which opens a workflow for it."""
        return bool(self.plan.body["worker"] == CONDUCTOR)

    @property
    def inherits(self) -> bool:
        """Return True if its task is the view of the step in which it is nested."""
        return bool(self.plan.body.get("inherits"))

    @property
    def inputs(self) -> tuple[int, ...]:
        """Return the steps on its access list."""
        return tuple(entry for entry in self.plan.body["access"] if entry != "user")

    @property
    def settled(self) -> Fact | None:
        """Return the first fact that settled it, which counts."""
        settling = [fact for fact in self.facts if fact.kind in SETTLING]
        return settling[0] if settling else None

    def settled_by(self, seq: int) -> bool:
        """Return True if it was settled before this event."""
        settled = self.settled
        return settled is not None and settled.seq < seq

    @property
    def exchanges(self) -> list[Exchange]:
        """Return its uses of the caller's tools, in order."""
        found: list[Exchange] = []
        for fact in self.facts:
            if fact.kind is Kind.STEP_AWAITING:
                found.append(Exchange(fact, results=None))
            elif fact.kind is Kind.STEP_RESULTS and found and found[-1].results is None:
                found[-1] = Exchange(found[-1].awaiting, fact)
        return found

    @property
    def done(self) -> Fact | None:
        """Return its completion, if it was settled by that."""
        settled = self.settled
        if settled is not None and settled.kind is Kind.STEP_DONE:
            return settled
        return None


@dataclass(slots=True)
class Proposal:
    """One proposal: its opening, its steps, and its verdicts."""

    number: int
    opened: Fact
    steps: list[Step] = field(default_factory=list)
    verdicts: list[Fact] = field(default_factory=list)
    dropped: Fact | None = None
    """The end of the wait for its approval, if it was dropped then."""

    @property
    def round(self) -> int:
        """Return the number of the workflow that it proposes."""
        return int(self.opened.body.get("round", 1))

    @property
    def parent(self) -> int | None:
        """Return the step in which it is nested, or None."""
        n: int | None = self.opened.body.get("parent")
        return n

    @property
    def answer(self) -> Step | None:
        """Return the step whose output is its answer: the last one with an output, or the last one if none has; None if
        the last one is not done."""
        if self.accepted is None or not self.steps or self.steps[-1].done is None:
            return None
        spoken = [step for step in self.steps if step.done is not None and step.done.body["chars"]]
        return (spoken or self.steps)[-1]

    @property
    def accepted(self) -> Fact | None:
        """Return the acceptance, if that came first and was not taken back."""
        if self.dropped is not None:
            return None
        if self.verdicts and self.verdicts[0].kind is Kind.PLAN_ACCEPTED:
            return self.verdicts[0]
        return None

    @property
    def rejected(self) -> Fact | None:
        """Return the rejection, if that came first."""
        if self.verdicts and self.verdicts[0].kind is Kind.PLAN_REJECTED:
            return self.verdicts[0]
        return None


@dataclass(slots=True)
class Account:
    """A run, as the rules read it."""

    run: str
    record: Record
    now: float
    """When the journal was read, in seconds since 1970."""
    patient: bool = True
    """True if the outcome of a call that may be in flight is not missed yet."""
    facts: list[Fact] = field(default_factory=list)
    proposals: list[Proposal] = field(default_factory=list)
    steps: dict[int, Step] = field(default_factory=dict)
    calls: dict[str, Call] = field(default_factory=dict)
    ends: list[Fact] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    """At least one in a run that begins with its admission."""
    approvals: list[Fact] = field(default_factory=list)
    """The questions for approvals and the decisions, in order."""
    flaws: list[Violation] = field(default_factory=list)
    """The violations that were found while sorting."""

    @property
    def begun(self) -> bool:
        """Return True if the journal begins with the admission. Without it no rule can be applied."""
        return bool(self.facts) and self.facts[0].kind is Kind.ADMITTED

    @property
    def admitted(self) -> Mapping[str, Any]:
        """Return the body of `run.admitted`. The run must begin with it."""
        return self.facts[0].body

    @property
    def placed(self) -> tuple[str, str, str]:
        """Return its tier, the model id of its request and the subject that serves it, by which `tier_of` finds the
        tier as it was for the run."""
        admitted = self.admitted
        return admitted["tier"], admitted["model"], str(admitted.get("served_by", ""))

    @property
    def limits(self) -> Mapping[str, Any]:
        """Return the limits that the run was admitted with. One that later releases have added may be left out."""
        return {"floor_tokens": FLOOR_TOKENS, **self.admitted["limits"]}

    @property
    def end(self) -> Fact | None:
        """Return the first terminal event, which counts."""
        return self.ends[0] if self.ends else None

    @property
    def unread(self) -> bool:
        """Return True if it was ended, after its deadline, by older code that did not understand its journal. Such an
        end settles no step and splits no bill."""
        return self.end is not None and self.end.kind is Kind.EXPIRED and self.end.body.get("unread") is True

    def tries(self, parent: int | None = None) -> Sequence[Proposal]:
        """Return the proposals that are nested in a step, or with None those for the run itself."""
        return [proposal for proposal in self.proposals if proposal.parent == parent]

    @property
    def openers(self) -> Sequence[Step]:
        """Return the steps for which a plan was made."""
        parents = {proposal.parent for proposal in self.proposals}
        return [step for step in self.steps.values() if step.n in parents]

    def around(self, step: Step) -> Step | None:
        """Return the step in which this one is nested, or None."""
        parent = self.proposals[step.plan.body["proposal"]].parent
        if parent is not None and parent < step.n:
            return self.steps.get(parent)
        return None

    def speaks(self, step: Step) -> bool:
        """Return True if its output is the answer of its round: it answers, and so does every step around it."""
        around = self.around(step)
        return bool(step.plan.body["answers"]) and (around is None or self.speaks(around))

    @property
    def planned(self) -> Sequence[Step]:
        """Return the steps of every round and of the workflows nested in it, and those of the latest proposals."""
        own = self.tries()
        kept = [attempt for attempt in own if attempt is own[-1] or (attempt.accepted and own[-1].round > 1)]
        kept += [self.tries(step.n)[-1] for step in self.openers]
        found: list[Step] = []
        for attempt in kept:
            found += attempt.steps
        return found

    def before(self, proposal: Proposal) -> Step | None:
        """Return the step that gave the answer of the previous round; None for a nested proposal."""
        if proposal.parent is not None:
            return None
        found = [
            attempt.answer
            for attempt in self.tries()
            if attempt.round == proposal.round - 1 and attempt.answer is not None
        ]
        return found[-1] if found else None

    @property
    def answered(self) -> Sequence[Proposal]:
        """Return the rounds that have an answer."""
        return [attempt for attempt in self.tries() if attempt.answer is not None]

    @property
    def erased(self) -> bool:
        """Return True if the run's content was erased, which erases its salt as well."""
        return self.record.row["salt"] is None

    def turn_at(self, seq: int) -> Turn:
        """Return the turn in which an event was written."""
        return next(turn for turn in reversed(self.turns) if turn.number == 0 or turn.began.seq < seq)

    def deadline_at(self, seq: int) -> float:
        """Return the deadline that was in force when an event was written. A decision on a plan moves it by the time
        for which the plan has waited."""
        turn = self.turn_at(seq)
        moved = [fact for fact in self.approvals if "deadline" in fact.body and turn.began.seq < fact.seq < seq]
        return float((moved or [turn.began])[-1].body["deadline"])

    def says(self, rule: str, seq: int, what: str) -> Violation:
        """Return a violation in this run."""
        return Violation(self.run, seq, rule, what)

    def of(self, *kinds: Kind) -> Iterator[Fact]:
        """Yield the facts of these kinds, in order."""
        return (fact for fact in self.facts if fact.kind in kinds)


def account(record: Record, now: float, patient: bool = True) -> Account:
    """Sort the events of one run."""
    made = Account(str(record.row["id"]), record, now, patient)
    _read(made)
    if not made.begun:
        made.flaws.append(made.says("not-admitted", 1, "the journal does not begin with an admission"))
        return made
    made.turns.append(Turn(0, made.facts[0]))
    for fact in made.facts[1:]:
        _place(made, fact)
    return made


def _read(made: Account) -> None:
    """Read the facts in the order of their numbers, each number once, and note faults of the numbers."""
    seen: dict[int, Fact] = {}
    last = 0
    for stored in made.record.events:
        if stored.seq in seen or stored.seq < last:
            made.flaws.append(made.says("seq-order", stored.seq, f"event {stored.seq} stands after event {last}"))
        elif stored.seq != last + 1:
            made.flaws.append(made.says("seq-gap", stored.seq, f"event {stored.seq} follows event {last}"))
        last = max(stored.seq, last)
        kind = KINDS.get(stored.kind)
        if kind is None:
            made.flaws.append(made.says("unknown-kind", stored.seq, "the journal has no such kind of event"))
            continue
        try:
            body = orjson.loads(stored.body)
        except orjson.JSONDecodeError:
            body = None
        if name := faulty(kind, body):
            made.flaws.append(made.says("body-malformed", stored.seq, f"{kind.value}: {name}"))
            continue
        seen.setdefault(stored.seq, Fact(stored.seq, kind, stored.at, body))
    made.facts = [seen[seq] for seq in sorted(seen)]


def _place(made: Account, fact: Fact) -> None:
    """Sort in one fact. A fact that has no place is a flaw."""
    kind, body = fact.kind, fact.body
    if kind is Kind.ADMITTED:
        made.flaws.append(made.says("not-admitted", fact.seq, "the run is admitted once more"))
    elif kind in TERMINAL:
        made.ends.append(fact)
    elif kind is Kind.PLAN_OPENED:
        _place_opening(made, fact)
    elif kind is Kind.PLAN_STEP:
        _place_step(made, fact)
    elif kind in (Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED):
        _place_verdict(made, fact)
    elif kind is Kind.CALL_INTENDED:
        _place_intent(made, fact)
    elif kind is Kind.CALL_FINISHED:
        _place_outcome(made, fact)
    elif kind in WAITS:
        _place_wait(made, fact)
    elif "n" in body:
        _place_in_step(made, fact, body["n"])


def _place_opening(made: Account, fact: Fact) -> None:
    """Add a proposal. If it is nested, its opening is also a fact of the step around it."""
    made.proposals.append(Proposal(len(made.proposals), fact))
    if (parent := fact.body.get("parent")) is not None:
        _place_in_step(made, fact, parent)


def _place_step(made: Account, fact: Fact) -> None:
    number = fact.body["proposal"]
    if not 0 <= number < len(made.proposals):
        made.flaws.append(made.says("plan-out-of-order", fact.seq, f"proposal {number} was never opened"))
        return
    step = Step(fact)
    if step.n in made.steps:
        made.flaws.append(made.says("step-number", fact.seq, f"step {step.n} is planned twice"))
        return
    made.steps[step.n] = step
    made.proposals[number].steps.append(step)


def _place_verdict(made: Account, fact: Fact) -> None:
    number = fact.body["proposal"]
    if 0 <= number < len(made.proposals):
        made.proposals[number].verdicts.append(fact)
    else:
        made.flaws.append(made.says("plan-out-of-order", fact.seq, f"proposal {number} was never opened"))


def _place_intent(made: Account, fact: Fact) -> None:
    name = fact.body["call"]
    if name in made.calls:
        made.flaws.append(made.says("call-twice", fact.seq, f"{name} is intended again"))
        return
    made.calls[name] = Call(name, fact, len(made.proposals) - 1)
    if fact.body["n"] is not None:
        _place_in_step(made, fact, fact.body["n"])


def _place_outcome(made: Account, fact: Fact) -> None:
    call = made.calls.get(fact.body["call"])
    if call is None:
        made.flaws.append(made.says("outcome-without-intent", fact.seq, f"nobody intended {fact.body['call']}"))
        return
    if call.outcomes:
        made.flaws.append(made.says("outcome-twice", fact.seq, f"{call.id} had its outcome at {call.outcomes[0].seq}"))
    call.outcomes.append(fact)


def _place_wait(made: Account, fact: Fact) -> None:
    """Add the beginning or the end of a wait for tool results, or for an approval."""
    if fact.kind in APPROVALS:
        _place_approval(made, fact)
    else:
        _place_turn(made, fact)


def _place_turn(made: Account, fact: Fact) -> None:
    """Add the end of a turn by tool calls, or the beginning of the next one by their results."""
    last = made.turns[-1]
    number = last.number + (fact.kind is Kind.RESUMED)
    if (last.awaiting is None) is (fact.kind is Kind.RESUMED) or fact.body["turn"] != number:
        made.flaws.append(made.says("turn-out-of-order", fact.seq, f"{fact.kind.value} in turn {last.number}"))
    elif fact.kind is Kind.AWAITING:
        last.awaiting = fact
    else:
        made.turns.append(Turn(number, fact))


def _place_approval(made: Account, fact: Fact) -> None:
    """Add a question for an approval, or what came of it. The rules in `approvals.py` judge it."""
    number = fact.body["proposal"]
    if not 0 <= number < len(made.proposals):
        made.flaws.append(made.says("plan-out-of-order", fact.seq, f"proposal {number} was never opened"))
        return
    made.approvals.append(fact)
    if fact.kind is not Kind.REFUSED:
        made.turns[-1].moved = fact
    if fact.kind is Kind.APPROVAL_EXPIRED:
        made.proposals[number].dropped = fact


def _place_in_step(made: Account, fact: Fact, n: int) -> None:
    step = made.steps.get(n)
    if step is None:
        made.flaws.append(made.says("step-unplanned", fact.seq, f"step {n} was never planned"))
    else:
        step.facts.append(fact)
