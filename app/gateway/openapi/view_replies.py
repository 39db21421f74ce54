"""Models of the replies of `/v1/runs/{id}/graph`, `/timeline`, `/state`, `/views` and `/v1/runs/compare`.

They document, as those of `replies.py` do. Times named `start`, `end` and `seconds` are in seconds, the first two since
the admission.
"""

from typing import Literal

from app.gateway.openapi.explanation_replies import Explanation
from app.gateway.openapi.replies import Reply, RunState, Usage
from app.gateway.openapi.run_replies import RunFigures, StepFigures, StepInFull, WholeRun

StepStateName = Literal["waiting", "queued", "running", "awaiting_tool", "done", "failed", "skipped"]


class AtInstant(Reply):
    """A run at an instant."""

    run: str
    state: RunState
    seq: int
    """The number of the latest event at the instant."""
    last_seq: int
    """The number of the latest event of the run."""
    at: float
    """The instant, in seconds since 1970."""
    seconds: float
    """The instant, in seconds since the admission."""
    length_seconds: float
    """Seconds from the admission to the end of the run, or to the present while it goes on."""


class FirstWords(Reply):
    """The first words of a subtask. They are a model's text about the caller's, and not trusted."""

    state: Literal["given", "none", "erased", "not_shown"]
    """`none`: the step has no subtask and answers the conversation. `not_shown`: this key may not read content, or the
    request wants none."""
    text: str | None


class NodeAttempt(Reply):
    """One call for a step or a plan."""

    id: str
    worker: str
    start: float
    end: float | None
    """Null while it goes on."""
    outcome: Literal["ok", "error", "truncated", "cancelled", "unknown"] | None
    error: str | None
    cost_usd: float
    tokens: Usage


class GraphNode(Reply):
    """The caller, a proposal for a plan, or a step."""

    id: str
    """`caller`, `plan:0`, `step:0` and so on."""
    kind: Literal["caller", "plan", "step"]
    number: int | None
    """The number of the proposal or of the step."""
    state: str
    """The state of the run, the proposal or the step. A plan that waits for an approval is `awaiting_approval`."""
    worker: str | None
    """The worker that has the step, or the model that planned."""
    planned_worker: str | None
    round: int
    parent: int | None
    """The step that it is nested in."""
    proposal: int | None
    """The proposal that a step belongs to."""
    seq: int
    """The number of the event from which on it is there."""
    replaced: bool
    """True if another plan has taken the place of its plan."""
    answers: bool
    """True if its output is the run's answer."""
    error: str | None
    """Why a step failed or was skipped, or why a plan was rejected."""
    cost_usd: float
    seconds: float
    """Seconds of its calls."""
    tokens: Usage
    attempts: list[NodeAttempt]
    x: int
    """The column of its place on the page, from 0."""
    y: int
    """The row of its place on the page, from 0."""
    subtask: FirstWords | None = None
    """Of a step."""


class GraphEdge(Reply):
    """Words that a node was shown of another one, or was not."""

    source: str
    target: str
    kind: Literal["granted", "withheld"]
    what: Literal["conversation", "subtask", "output", "task", "tool_results", "answer"]
    """`task`: that of the step which a plan is nested in. `answer`: that of the round before."""
    sent: bool
    """True if a call for the target contained them."""
    reason: Literal["not_listed", "no_output", "policy"] | None
    """Why they were withheld: the access list leaves them out; the earlier step ended without words; the worker may not
    read them."""
    by: str | None
    """Who or what decided so: `conductor`, `caller`, `fixed_plan` and so on as in the explanation, the state of the
    earlier step, or `clearance` or `rule`."""
    detail: str | None
    """The journal's own words about it."""
    worker: str | None
    """The worker that was not shown them, if another one has the step; null: whichever has it."""


class Graph(AtInstant):
    """The graph of a run at an instant."""

    object: Literal["run.graph"]
    columns: int
    rows: int
    nodes: list[GraphNode]
    """In the order in which they appeared."""
    edges: list[GraphEdge]


class TimelineSpan(Reply):
    """A stretch of time."""

    id: str
    kind: Literal[
        "run", "queue", "round", "planning", "people", "step", "retry", "attempt", "first_word", "stream", "tools"
    ]
    """`people`: the wait for an approval. `tools`: the wait for results of the caller's tools. `retry`: the pause after
    a call until the next one."""
    parent: str | None
    """The span that it is in."""
    depth: int
    start: float
    end: float | None
    """Null while it goes on."""
    seconds: float
    round: int
    step: int | None
    proposal: int | None
    call: str | None
    worker: str | None
    state: str | None
    """The outcome of a call, the state of a step, a plan or the run."""
    error: str | None
    cost_usd: float | None
    """The money of the calls in it; null for waits and for the phases of a call."""
    cost_start_usd: float | None
    """Where it begins if areas are drawn by money: the money of what stands before it."""
    tokens: Usage | None


class SpanTotal(Reply):
    """The sum over the spans of one kind. Spans that overlap count each by itself."""

    count: int
    seconds: float
    cost_usd: float | None


class Timeline(AtInstant):
    """The timeline of a run at an instant."""

    object: Literal["run.timeline"]
    cost_usd: float
    spans: list[TimelineSpan]
    """Each after the one that it is in."""
    totals: dict[str, SpanTotal]


class CallAtInstant(Reply):
    """A call as it was at an instant."""

    id: str
    worker: str
    outcome: Literal["ok", "error", "truncated", "cancelled", "unknown"] | None
    """Null while it goes on."""
    cost_usd: float
    held_usd: float
    seconds: float


class StepAtInstant(Reply):
    """A step as it was at an instant."""

    n: int
    proposal: int
    worker: str
    state: StepStateName
    replaced: bool
    error: str | None
    chars: int
    """Characters of its output."""
    finish: str | None
    tool_calls: int
    cost_usd: float
    usage: Usage
    calls: list[CallAtInstant]


class ProposalAtInstant(Reply):
    """A proposal as it was at an instant."""

    number: int
    round: int
    parent: int | None
    mode: Literal["first", "repair", "fallback"]
    conductor: str
    state: Literal["open", "accepted", "rejected"]
    outage: bool
    reasons: list[str]
    topology: str | None
    steps: list[int]


class Waits(Reply):
    """The results or the decision that a run waits for."""

    kind: Literal["tools", "approval"]
    until: float


class StateAtInstant(AtInstant):
    """The state of a run at an instant: the fold of its journal up to then."""

    object: Literal["run.state"]
    event: str
    """The kind of the latest event."""
    turn: int
    deadline: float
    rounds: int
    topology: str | None
    degraded: bool
    cancel_asked: bool
    waits: Waits | None
    cost_usd: float
    held_usd: float
    """The money that is reserved for calls in flight."""
    usage: Usage
    proposals: list[ProposalAtInstant]
    planning: list[CallAtInstant]
    """The calls for plans."""
    steps: list[StepAtInstant]
    answer_step: int | None
    error: str | None


class Views(Reply):
    """A run with all of its views, of one reading of its journal."""

    object: Literal["run.views"]
    run: WholeRun
    """The run as it is now."""
    key_name: str | None
    """The name of its key; null if the key is not in the database."""
    state: StateAtInstant
    graph: Graph
    timeline: Timeline
    step: StepInFull | None
    """The step that was asked for, as it is now; null without the scope `audit:read`."""
    explanation: Explanation | None


class PlacedStep(StepFigures):
    """A step of one of two runs."""

    place: str
    """Its round, counted from 1, and its position in the plan, counted from 0."""


class StepDifference(Reply):
    """The second step's figures less the first one's."""

    cost_usd: float
    seconds: float
    input_tokens: int
    output_tokens: int


class StepAccess(Reply):
    """The access that only one of two steps was granted: `user`, and places of steps, each in its own run."""

    only_first: list[str]
    only_second: list[str]


class StepPair(Reply):
    """Two steps side by side; null where a run has no such step."""

    aligned_by: Literal["subtask", "worker", "place", "alone"]
    first: PlacedStep | None
    second: PlacedStep | None
    differs: list[Literal["worker", "state", "access", "tokens", "cost", "output"]]
    difference: StepDifference | None
    access: StepAccess
    same_output: bool | None
    """Null where a text is missing, was erased or may not be read."""


class SideBySide(Reply):
    """Two runs, the second against the first."""

    object: Literal["run.side_by_side"]
    first: RunFigures
    second: RunFigures
    difference: dict[str, float | None]
    """The second run's figure less the first one's; null where one is not known."""
    same_answer: bool | None
    steps: list[StepPair]
