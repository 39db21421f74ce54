"""Models of the reply of `GET /v1/runs/{id}/explain`. They document, as those of `replies.py` do."""

from typing import Any, Literal

from app.gateway.openapi.replies import Reply, RunState
from app.gateway.openapi.run_replies import KeptFrom, Origin

DecidedBy = Literal["conductor", "caller", "fixed_plan", "random_plan", "selector", "fallback", "repeated_plan"]
LeftOutBy = Literal["clearance", "rule", "caller", "health", "budget", "approval", "ability"]


class Reason(Reply):
    """A reason that a conductor gave. It is a model's text about the caller's, and not trusted."""

    state: Literal["given", "none", "not_asked", "erased", "not_shown"]
    """`none`: it was asked for its reasons and gave none. `not_shown`: this key may not read content."""
    text: str | None


class Alternative(Reply):
    """One choice that a selector could make."""

    action: str
    probability: float
    success: float | None
    """The predicted probability of a right answer; null where the journal does not have it."""
    cost_usd: float | None
    """The predicted cost."""


class SelectorChoice(Reply):
    """A selector's choice, with its likeliest alternatives and the choice itself as the first of them."""

    proposal: int
    """The proposal that it was made for."""
    action: str
    probability: float
    explored: bool
    """True if another choice than the best one was drawn."""
    explores: bool
    """True if it was allowed to explore."""
    version: str
    candidates: int
    alternatives: list[Alternative]
    left_out: list[dict[str, Any]]
    """Choices that the run's money or time did not bear, each with what it would have taken."""


class ProposalVerdict(Reply):
    """A proposal and what became of it."""

    number: int
    round: int
    parent: int | None
    mode: Literal["first", "repair", "fallback"]
    state: Literal["open", "accepted", "rejected"]
    outage: bool
    topology: str | None
    rejected_because: list[str]


class Shape(Reply):
    """The reasons for the run's topology."""

    topology: str | None
    rounds: int
    step_count: int
    decided_by: DecidedBy | None
    conductor: str | None
    """The model that planned."""
    version: str | None
    reason: Reason
    choice: SelectorChoice | None
    proposals: list[ProposalVerdict]
    rejected: int


class PoolWorker(Reply):
    """A worker that could be chosen, by its card at the admission."""

    worker: str
    strengths: list[str]
    input_usd: float | None
    """Dollars for a million input tokens."""
    output_usd: float | None
    steps: list[int]
    """The steps that it did."""


class LeftOut(Reply):
    """A worker that could not be chosen, or was not called."""

    worker: str
    reason: str
    by: LeftOutBy
    proposal: int | None
    """The proposal from which it was left out; null if it was left out of the whole run, or of one step."""


class ApprovalExplained(Reply):
    """A plan that needed an approval, and the decision; null while it waits."""

    proposal: int
    needed_because: list[str]
    worst_case_usd: float | None
    decision: Literal["approved", "refused", "expired"] | None
    by: str | None
    max_usd: float | None
    """The most that the run may cost."""
    reason: Reason
    """The approver's reason."""


class StepSaw(Reply):
    """The sources of the messages of a step's worker, besides its subtask."""

    user: bool
    task_of: int | None
    """The step that it is nested in, if it was shown the task of that one."""
    steps: list[int]
    unseen: list[int]
    """Steps on its access list of which nothing was shown, because they ended without an output."""
    tool_results: int


class StepWithheld(Reply):
    """The words and outputs that a plan could have shown to a step and did not."""

    user: bool
    steps: list[int]
    by: DecidedBy | Literal["outer_step"] | None
    """The one who decided that; null if nothing was withheld."""
    reason: Reason


class ExplainedCall(Reply):
    """One call of a worker for a step."""

    worker: str
    outcome: str | None
    error: str | None
    reason: str | None
    cost_usd: float | None
    seconds: float | None
    despite: str | None


class ExplainedStep(Reply):
    """A step: the reasons why its worker did it, and what that worker saw."""

    n: int
    round: int
    parent: int | None
    state: str
    error: str | None
    has_begun: bool
    """True once a worker was called for it, or the conductor was asked for the workflow inside it."""
    kept_from: KeptFrom | None
    """The step whose output a replay has taken over without a call."""
    worker: str
    planned_worker: str
    chosen_by: DecidedBy
    nested: bool
    probability: float | None
    reason: Reason
    saw: StepSaw
    withheld: StepWithheld
    calls: list[ExplainedCall]
    call_count: int
    failed_calls: int
    replaced: bool
    """True if another worker than the planned one did it."""
    not_called: list[LeftOut]
    cost_usd: float


class CostCompared(Reply):
    """The cost of the run, and what the calls of its steps would have cost with the cheapest worker of its pool."""

    cost_usd: float
    planning_usd: float
    steps_usd: float
    call_count: int
    estimated: bool
    unknown_calls: int
    cheapest_worker: str | None
    cheapest_usd: float | None
    difference_usd: float | None
    """Without a sign; `dearer` says which is more."""
    dearer: bool | None
    method: str


class AnswerSupport(Reply):
    """The facts that speak for the answer, and those that speak against it."""

    step: int | None
    worker: str | None
    finish: str | None
    refusal: bool
    rests_on: list[int]
    """Steps whose output the answering step saw."""
    same_text: list[int]
    """Other steps whose output is the same text."""
    other_answers: list[int]
    accepted_in_round: int | None
    """The round in which the conductor was shown the answer and accepted it."""
    form_repairs: int
    """The number of times that a worker was asked again because its answer did not match the requested format."""
    fell_back: bool
    stopped: str | None
    degraded: bool
    error: str | None
    ratings: list[dict[str, Any]]


class Gap(Reply):
    """Something that nobody knows, and the cause of that."""

    about: str
    step: int | None
    cause: str


class Explanation(Reply):
    """A run explained. `text` says in sentences what the other fields have as data."""

    object: Literal["run.explanation"]
    run: str
    state: RunState
    tier: str
    served_by: str | None
    """The subject that served the run in place of its tier's own definition; null where that did."""
    preview: bool
    rehearsal: bool
    erased: bool
    origin: Origin | None
    """The run that it comes from."""
    shape: Shape
    pool: list[PoolWorker]
    excluded: list[LeftOut]
    approvals: list[ApprovalExplained]
    steps: list[ExplainedStep]
    cost: CostCompared
    answer: AnswerSupport
    unknown: list[Gap]
    text: str
