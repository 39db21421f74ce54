"""The graph of a run at an instant: its plans and steps, what each of them was shown, and what was withheld from it.

    nodes ....... the caller; each proposal of a conductor; each step of all rounds, of nested workflows, and of plans
                  that were replaced. A node has the calls that were made for it, in order
    granted ..... the caller's words, a subtask, an earlier output, the task of a nested workflow, results of tools.
                  `sent` is true once a call was journaled that contains them
    withheld .... words that the plan could have shown to a step and did not (`not_listed`), outputs on the access list
                  that had no words (`no_output`), and what a worker was not shown because of its clearance or of a rule
                  (`policy`)

Every edge follows from events; none is guessed. Money is in micro-dollars, points in time are in seconds since the
admission. The layout does not move a node when a plan that is still made adds another one (`layout.py`).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, Literal

from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Usage, sum_usages, usage_to_json
from app.core.pool.catalog import MILLION
from app.core.pool.policy import decided_by
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    PlanOpened,
    PlanStep,
    StepFailed,
    facts,
    facts_with_times,
)
from app.core.run.instant import Instant, instant_to_json, round_seconds
from app.core.run.layout import Place, layout
from app.core.run.recipients import EMBEDDING_TEMPLATE, proposal_of_call, steps_seen_by_recipient
from app.core.run.state import Proposal, RunState, StepState
from app.core.run.withheld import find_decider, find_withheld

CALLER: Final = "caller"
"""The node of the caller's words."""
BY_POLICY: Final = ("clearance", "rule")
"""The parts of the policy that can forbid a worker to read something: the clearance on its card, or a rule."""

NodeKind = Literal["caller", "plan", "step"]
What = Literal["conversation", "subtask", "output", "task", "tool_results", "answer"]
Reason = Literal["", "not_listed", "no_output", "policy"]


def plan_node(proposal: int) -> str:
    """Return the name of a proposal's node."""
    return f"plan:{proposal}"


def step_node(n: int) -> str:
    """Return the name of a step's node."""
    return f"step:{n}"


class Attempt(Struct, frozen=True):
    """One call for a node; `ended` and `outcome` are None while it goes on."""

    call: str
    worker: str
    start: float
    ended: float | None = None
    outcome: str | None = None
    error: str = ""
    usd: int = 0
    usage: Usage = Usage()

    def to_json(self) -> dict[str, Any]:
        """Return the attempt in plain JSON values."""
        return {
            "id": self.call,
            "worker": self.worker,
            "start": round_seconds(self.start),
            "end": round_seconds(self.ended) if self.ended is not None else None,
            "outcome": self.outcome,
            "error": self.error or None,
            "cost_usd": self.usd / MILLION,
            "tokens": usage_to_json(self.usage),
        }


class Node(Struct, frozen=True):
    """The caller, a proposal or a step, with its place on the page."""

    id: str
    kind: NodeKind
    number: int | None
    """The number of the proposal or of the step."""
    state: str
    worker: str
    """The worker that has the step, or the conductor's model; empty where nobody was called."""
    planned_worker: str
    round: int
    parent: int | None
    """The step that it is nested in."""
    proposal: int | None
    """The proposal that a step belongs to."""
    subtask: str
    """Ref of the step's subtask, or empty."""
    seq: int
    """The number of the event from which on it is there."""
    replaced: bool = False
    """True if another plan has taken the place of its plan."""
    answers: bool = False
    """True if its output is the run's answer."""
    error: str = ""
    attempts: tuple[Attempt, ...] = ()
    place: Place = Place(0, 0)

    @property
    def usd(self) -> int:
        """Return the micro-dollars of its finished calls."""
        return sum(attempt.usd for attempt in self.attempts)

    @property
    def seconds(self) -> float:
        """Return the seconds of its finished calls."""
        return sum(attempt.ended - attempt.start for attempt in self.attempts if attempt.ended is not None)

    def to_json(self) -> dict[str, Any]:
        """Return the node in plain JSON values, without any text."""
        return {
            "id": self.id,
            "kind": self.kind,
            "number": self.number,
            "state": self.state,
            "worker": self.worker or None,
            "planned_worker": self.planned_worker or None,
            "round": self.round,
            "parent": self.parent,
            "proposal": self.proposal,
            "seq": self.seq,
            "replaced": self.replaced,
            "answers": self.answers,
            "error": self.error or None,
            "cost_usd": self.usd / MILLION,
            "seconds": round_seconds(self.seconds),
            "tokens": usage_to_json(sum_usages(attempt.usage for attempt in self.attempts)),
            "attempts": [attempt.to_json() for attempt in self.attempts],
            "x": self.place.x,
            "y": self.place.y,
        }


class Edge(Struct, frozen=True):
    """Words that one node was shown, or was not shown, of another one."""

    source: str
    target: str
    kind: Literal["granted", "withheld"]
    what: What
    sent: bool = False
    """True if a call for the target contained them. Never true of what was withheld."""
    reason: Reason = ""
    """Why they were withheld; empty for what was granted."""
    by: str = ""
    """The author of the plan, the rule or the clearance that decided so, or the state of a step without output."""
    detail: str = ""
    """The journal's own words about it, or empty."""
    worker: str = ""
    """The worker that was not shown them; empty: whichever worker has the step."""

    def to_json(self) -> dict[str, Any]:
        """Return the edge in plain JSON values."""
        return {
            "source": self.source,
            "target": self.target,
            "kind": self.kind,
            "what": self.what,
            "sent": self.sent,
            "reason": self.reason or None,
            "by": self.by or None,
            "detail": self.detail or None,
            "worker": self.worker or None,
        }


class Graph(Struct, frozen=True):
    """The nodes in the order in which they appeared, and the edges between them."""

    at: Instant
    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...]

    @property
    def columns(self) -> int:
        """Return the number of columns that have a node."""
        return 1 + max(node.place.x for node in self.nodes)

    @property
    def rows(self) -> int:
        """Return the number of rows that have a node."""
        return 1 + max(node.place.y for node in self.nodes)

    def to_json(self) -> dict[str, Any]:
        """Return the graph in plain JSON values, without any text."""
        return {
            "object": "run.graph",
            "run": self.at.state.run,
            "state": self.at.state.state,
            **instant_to_json(self.at),
            "columns": self.columns,
            "rows": self.rows,
            "nodes": [node.to_json() for node in self.nodes],
            "edges": [edge.to_json() for edge in self.edges],
        }


def graph(at: Instant) -> Graph:
    """Return the graph of a run at an instant."""
    index = _index(at)
    nodes = [_caller(index)]
    for event in at.events:
        if isinstance(event.fact, PlanOpened | PlanStep):
            nodes.append(_node(index, event))
    places = layout([(node.id, _predecessors(index, node)) for node in nodes])
    nodes_with_places = tuple([replace(node, place=places[node.id]) for node in nodes])
    return Graph(at, nodes_with_places, tuple(_edges(index)))


class _Index(Struct, frozen=True):
    """Indexes of the journal that are looked up often, each made once."""

    at: Instant
    state: RunState
    proposals: Mapping[int, Proposal]
    planned: frozenset[int]
    """The steps of plans that no other one has replaced."""
    steps_of: Mapping[int, Sequence[StepState]]
    """The steps of each proposal."""
    intents: Mapping[str, Sequence[CallIntended]]
    """The calls for each node."""
    attempts: Mapping[str, Sequence[Attempt]]
    failures: Mapping[int, StepFailed]
    """The failures of steps, with the workers that were passed over for them."""


def _index(at: Instant) -> _Index:
    state = at.state
    steps_of: dict[int, list[StepState]] = {}
    for step in state.steps.values():
        steps_of.setdefault(step.proposal, []).append(step)
    intents: dict[str, list[CallIntended]] = {}
    attempts: dict[str, list[Attempt]] = {}
    outcomes = {outcome.call: (time, outcome) for time, outcome in facts_with_times(at.events, CallFinished)}
    for time, intent in facts_with_times(at.events, CallIntended):
        node = _node_of_call(intent)
        intents.setdefault(node, []).append(intent)
        attempt = _attempt(at.admitted_at, time, intent, outcomes.get(intent.call))
        attempts.setdefault(node, []).append(attempt)
    return _Index(
        at=at,
        state=state,
        proposals={proposal.number: proposal for proposal in state.all_proposals},
        planned=frozenset([step.n for step in state.planned_steps]),
        steps_of=steps_of,
        intents=intents,
        attempts=attempts,
        failures={fact.n: fact for fact in facts(at.events, StepFailed)},
    )


def _node_of_call(intent: CallIntended) -> str:
    """Return the node that a call was made for."""
    if intent.n is not None:
        return step_node(intent.n)
    return plan_node(proposal_of_call(intent))


def _attempt(
    admitted_at: float, intended_at: float, intent: CallIntended, end: tuple[float, CallFinished] | None
) -> Attempt:
    """Return the attempt of a call; `end` is when its outcome was written, and the outcome."""
    start = intended_at - admitted_at
    if end is None:
        return Attempt(intent.call, intent.worker, start)
    ended_at, outcome = end
    return Attempt(
        call=intent.call,
        worker=intent.worker,
        start=start,
        ended=max(ended_at - admitted_at, start),
        outcome=outcome.outcome,
        error=outcome.error or "",
        usd=outcome.usd,
        usage=outcome.usage,
    )


# -- nodes


def _caller(index: _Index) -> Node:
    return Node(
        id=CALLER,
        kind="caller",
        number=None,
        state=index.state.state,
        worker="",
        planned_worker="",
        round=1,
        parent=None,
        proposal=None,
        subtask="",
        seq=1,
    )


def _node(index: _Index, event: Event) -> Node:
    fact = event.fact
    if isinstance(fact, PlanOpened):
        return _plan(index, fact, event.seq)
    assert isinstance(fact, PlanStep)
    step, proposal, end = index.state.steps[fact.n], index.proposals[fact.proposal], index.state.end
    return Node(
        id=step_node(step.n),
        kind="step",
        number=step.n,
        state=step.state,
        worker=step.worker,
        planned_worker=fact.worker,
        round=proposal.round,
        parent=proposal.parent,
        proposal=proposal.number,
        subtask=step.subtask,
        seq=event.seq,
        replaced=step.n not in index.planned,
        answers=end is not None and end.step == step.n,
        error=step.error,
        attempts=tuple(index.attempts.get(step_node(step.n), ())),
    )


def _plan(index: _Index, fact: PlanOpened, seq: int) -> Node:
    proposal = index.proposals[fact.proposal]
    node = plan_node(fact.proposal)
    planning = [call for call in index.intents.get(node, ()) if call.template != EMBEDDING_TEMPLATE]
    state: str = proposal.state
    if _awaits_approval(index.state, fact.proposal):
        state = "awaiting_approval"
    worker = ""
    if planning:
        worker = planning[-1].worker
    return Node(
        id=node,
        kind="plan",
        number=fact.proposal,
        state=state,
        worker=worker,
        planned_worker="",
        round=proposal.round,
        parent=proposal.parent,
        proposal=None,
        subtask="",
        seq=seq,
        replaced=proposal.state == "rejected",
        error="; ".join(proposal.reasons),
        attempts=tuple(index.attempts.get(node, ())),
    )


def _awaits_approval(state: RunState, proposal: int) -> bool:
    """Return True if the run waits for an approval of this proposal."""
    if state.state != "awaiting_approval" or state.awaits_approval is None:
        return False
    return state.awaits_approval.number == proposal


def _predecessors(index: _Index, node: Node) -> Sequence[str]:
    """Return the nodes by which a node is placed; each of them appeared before it."""
    if node.kind == "caller":
        return ()
    if node.kind == "plan":
        return _predecessors_of_plan(index, node)
    assert node.number is not None
    assert node.proposal is not None
    inputs = index.state.steps[node.number].access.steps
    return [plan_node(node.proposal), *[step_node(n) for n in inputs]]


def _predecessors_of_plan(index: _Index, node: Node) -> Sequence[str]:
    """Return the nodes by which a plan is placed: the step around it, or the steps of the round before, else the
    caller."""
    if node.parent is not None:
        return [step_node(node.parent)]
    round_before = [step_node(step.n) for step in index.state.steps_of_round(node.round - 1)]
    if round_before:
        return round_before
    return [CALLER]


# -- edges


def _edges(index: _Index) -> Iterator[Edge]:
    for proposal in index.proposals.values():
        yield from _edges_to_conductor(index, proposal)
        by = find_decider(proposal, index.at.events)
        for step in index.steps_of.get(proposal.number, ()):
            yield from _edges_granted(index, proposal, step)
            yield from _edges_withheld(index, proposal, step, by)
            yield from _by_policy(index, step)


def _edges_to_conductor(index: _Index, proposal: Proposal) -> Iterator[Edge]:
    node = plan_node(proposal.number)
    calls = index.intents.get(node, ())
    if proposal.parent is not None:
        yield Edge(step_node(proposal.parent), node, "granted", "task", sent=bool(calls))
    if any(call.access.user for call in calls):
        yield Edge(CALLER, node, "granted", "conversation", sent=True)
    for n in _steps_in_calls(calls):
        yield Edge(step_node(n), node, "granted", "answer", sent=True)


def _steps_in_calls(calls: Sequence[CallIntended]) -> Mapping[int, None]:
    """Return the steps whose outputs stood in these calls, each once, in their order."""
    steps: dict[int, None] = {}
    for call in calls:
        steps |= dict.fromkeys(steps_seen_by_recipient(call))
    return steps


def _edges_granted(index: _Index, proposal: Proposal, step: StepState) -> Iterator[Edge]:
    node = step_node(step.n)
    calls = index.intents.get(node, ())
    yield Edge(plan_node(proposal.number), node, "granted", "subtask", sent=bool(calls))
    if step.access.user:
        yield Edge(CALLER, node, "granted", "conversation", sent=bool(calls))
    if step.inherits and proposal.parent is not None:
        yield Edge(step_node(proposal.parent), node, "granted", "task", sent=bool(calls))
    steps_in_calls = _steps_in_calls(calls)
    for n in step.access.steps:
        source = index.state.steps[n]
        if source.settled and not source.chars and n not in steps_in_calls:
            detail = source.error if source.state != "done" else ""
            yield Edge(step_node(n), node, "withheld", "output", reason="no_output", by=source.state, detail=detail)
        else:
            yield Edge(step_node(n), node, "granted", "output", sent=n in steps_in_calls)
    if any(use.results for use in step.exchanges):
        yield Edge(CALLER, node, "granted", "tool_results", sent=any(call.results for call in calls))


def _edges_withheld(index: _Index, proposal: Proposal, step: StepState, by: str) -> Iterator[Edge]:
    """Yield the edges of what the access list leaves out."""
    withheld = find_withheld(index.state, step, proposal, by, index.steps_of[proposal.number])
    node = step_node(step.n)
    if withheld.user:
        yield Edge(CALLER, node, "withheld", "conversation", reason="not_listed", by=withheld.by)
    for n in withheld.steps:
        yield Edge(step_node(n), node, "withheld", "output", reason="not_listed", by=by)


def _by_policy(index: _Index, step: StepState) -> Iterator[Edge]:
    """Yield the edges of what was not shown to workers that may not read it: the step went to another worker, or
    failed."""
    node = step_node(step.n)
    passed_over: list[tuple[str, str]] = []
    for intent in index.intents.get(node, ()):
        passed_over += intent.passed_over
    if step.n in index.failures:
        passed_over += index.failures[step.n].passed_over
    sources: list[tuple[str, What]] = [(step_node(n), "output") for n in step.access.steps]
    if step.access.user:
        sources.insert(0, (CALLER, "conversation"))
    for worker, reason in dict.fromkeys(passed_over):
        by = decided_by(reason)
        if by in BY_POLICY:
            for source, what in sources:
                yield Edge(source, node, "withheld", what, reason="policy", by=by, detail=reason, worker=worker)
