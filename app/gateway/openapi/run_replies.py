"""Models of the replies of `/v1/runs`: the audit trail and ratings. They document, as those of `replies.py` do."""

from typing import Any, Literal

from app.gateway.openapi.plan_replies import Estimate
from app.gateway.openapi.replies import Reply, RunState, StepSummary, TokenUsage, Usage


class Amount(Reply):
    """Money and tokens."""

    usd: float
    tokens: int


class Origin(Reply):
    """A run from which another one follows: that one executes its plan, repeats it, or is its shadow."""

    kind: Literal["plan", "replay", "shadow"]
    run: str


class Run(Reply):
    """A run as lists show it."""

    id: str
    object: Literal["run"]
    tenant: str
    key: str
    tier: str
    model: str
    state: RunState
    created_at: float
    ended_at: float | None
    deadline: float
    topology: str | None
    degraded: bool
    steps: int
    spent: Amount
    held: Amount
    cap: Amount
    error: str | None
    origin: Origin | None
    """The run from which this one follows; null where it follows from none."""
    workers: list[str] | None = None
    """The workers that were sent something for a step; only where `include` asks for them."""
    preview: bool | None = None
    """True if the run was only planned; only where `include` asks for it."""
    key_name: str | None = None
    """The name of its key; only where `include` asks for it."""


class RunCount(Reply):
    """The number of runs that the filters of a list select; null if there are more than `most`."""

    total: int | None
    in_front: int | None
    """The runs in front of the first one of the page."""
    most: int


class RunList(Reply):
    """A page. `next` is the value of `after` for the page that follows; `last_id` serves as well. `previous` is the
    value of `before` for the page in front."""

    object: Literal["list"]
    data: list[Run]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next: str | None
    previous: str | None
    """Null on the first page."""
    count: RunCount | None = None
    """Only where `include` asks for it."""


class RunLeft(Reply):
    """A run that is not on the page any more: others are in front of it, or it does not fit the filters now."""

    id: str
    object: Literal["run.left"]


RunListEvent = RunList | Run | RunLeft
"""An event of a page that is followed: first the page itself, then each run that is new on it or has changed, and each
that has left it."""


class Turn(Reply):
    """One of the caller's requests to a run: the first, or one that brought tool results."""

    number: int
    request_id: str | None
    """The `x-request-id` of the request."""
    reply_id: str | None
    """The id of the reply (`chatcmpl-...`, `resp_...`, `msg_...`), by which the run is found, too."""
    at: float
    deadline: float
    stream: bool
    ended_at: float | None
    finish: str | None
    results_until: float | None
    usage: Usage
    cost_usd: float


class Rating(Reply):
    """A rating of a run's answer by a caller, a grader or a rule; `score` is from 0 to 1."""

    id: str
    at: float
    kind: Literal["explicit", "grader", "implicit"]
    source: str
    version: str | None
    score: float | None
    label: str | None
    commented: bool


class RunRating(Rating):
    """A rating as it was stored."""

    object: Literal["run.feedback"]
    run: str


class Ratings(Reply):
    """Ratings that callers sent, that graders gave, and that follow from what callers did."""

    explicit: list[Rating]
    grader: list[Rating]
    implicit: list[Rating]


class Attempt(Reply):
    """One provider call for a step or a proposal. The fields after `outcome` are there once the call has ended."""

    id: str
    attempt: int | None
    worker: str
    provider: str | None
    endpoint: str | None = None
    """The name of the provider's endpoint, where it has several."""
    model: str | None
    version: str | None
    at: float
    access: list[int | Literal["user"]]
    request: str | None
    """The hash of the request as it was sent to the provider."""
    held: Amount
    """The amount that was reserved of the run's budget."""
    max_tokens: int
    """The most output tokens of the call."""
    wanted_tokens: int | None
    """The output tokens that it would have got if the budget had paid for them; null: it had them."""
    left_out: int
    """Of a planning call: the characters of the conversation that the conductor was not shown."""
    passed_over: list[Any]
    """Workers that were not called, each with the reason."""
    despite: Any
    outcome: str | None
    error: str | None = None
    blamed: Any = None
    retry_after: float | None = None
    reason: str | None = None
    """Why it failed; finer than `error`."""
    http_status: int | None = None
    provider_code: str | None = None
    """The provider's own code of the error."""
    provider_request_id: str | None = None
    excerpt: str | None = None
    """The beginning of the provider's error message, without anything of the request."""
    usage: Usage | None = None
    cost_usd: float | None = None
    seconds: float | None = None
    first_delta_seconds: float | None = None
    finish: str | None = None
    out_of_time: bool | None = None
    """True if the time of the run was over before the text was complete, and what there was of it is the answer."""
    refused: bool | None = None
    output: str | None = None
    """The text that the worker wrote; only in a step that is read in full."""


class Exchange(Reply):
    """One use of the caller's tools by a step. `said` and `results` are only in a step that is read in full."""

    turn: int
    attempt: str
    worker: str
    at: float
    calls: list[dict[str, Any]]
    answered_at: float | None
    said: dict[str, Any] | None = None
    results: list[dict[str, Any]] | None = None


class Proposal(Reply):
    """A workflow that a conductor proposed, with the calls that it took."""

    number: int
    mode: Literal["first", "repair", "fallback"]
    round: int
    parent: int | None
    """The step that this is nested in."""
    conductor: str
    state: Literal["open", "accepted", "rejected"]
    outage: Any
    reasons: list[str]
    """The reasons why it was rejected."""
    topology: str | None
    decision: Any
    order: list[str] | None
    """The workers in the order in which the conductor saw them."""
    steps: list[int]
    probabilities: dict[str, float | None]
    attempts: list[Attempt]
    embedding_attempts: list[Attempt]
    """The calls for an embedding of what the caller said, at which the selector looked before it chose."""


class KeptFrom(Reply):
    """A step of an earlier run."""

    run: str
    step: int


class AuditedStep(StepSummary):
    """One step with its plan, its calls and its use of tools, without content."""

    proposal: int
    round: int
    planned_worker: str
    kept_from: KeptFrom | None
    """The step whose output a replay has taken over without a call; null for a step that was called."""
    probability: float | None
    labels: list[str]
    """The labels of what it read."""
    declassified: list[str]
    """The labels that its output lost, because its worker declassifies them."""
    tools: Any
    error: str | None
    passed_over: list[Any]
    chars: int
    finish: str | None
    started_at: float | None
    ended_at: float | None
    attempts: list[Attempt]
    exchanges: list[Exchange]
    detail: str
    """The path of the step in full."""


class Erasure(Reply):
    """The erasure of a run's content."""

    at: float | None
    """Seconds since 1970; null where a release before 0.3 erased it."""
    by: Literal["request", "retention", "tenant", "user", "operator"] | None
    """`request`: a caller's, for this run; `retention`: the end of its time; `tenant`, `user`: a command for everything
    of the run's tenant or end user; `operator`: another command."""


class WholeRun(Run):
    """A run with everything that is known of it but its content."""

    request_id: str | None
    """The `x-request-id` of the request that began the run."""
    trace_id: str | None
    """The id of the trace to which the run belongs."""
    erased: bool
    """True once the content was erased."""
    erasure: Erasure | None
    """Null unless the content was erased."""
    preview: bool
    """True if the run was only planned: nothing of the plan was executed."""
    seq: int
    """The number of the latest event."""
    served_by: str | None
    """The subject that served the run in place of its tier's own definition, such as `tier baton-next` or
    `worker old-gpt`; null where the tier's own did."""
    effort: str | None
    limits: dict[str, float]
    """The limits of this run, by the names that `GET /v1/models` uses."""
    labels: list[str]
    overrides: dict[str, Any] | None
    pool: list[str]
    excluded: dict[str, str]
    """Workers that may not take part, each with the reason."""
    catalog: str
    ignored: list[str]
    """Parameters of the request that had no effect."""
    conductor: str | None
    cancel_asked: bool
    rounds: int
    proposals: list[Proposal]
    steps: list[AuditedStep]  # type: ignore[assignment]
    """In the place of the number that lists show."""
    turns: list[Turn]
    usage: TokenUsage
    total_usage: Usage
    cost_usd: float
    end: dict[str, Any]
    feedback: Ratings


class RunFigures(Reply):
    """One of two runs that are compared."""

    run: str
    tier: str
    conductor: str
    state: str
    topology: str | None
    rounds: int
    degraded: bool
    error: str | None
    cost_usd: float
    seconds: float
    """From the admission to the latest reply."""
    input_tokens: int
    output_tokens: int
    calls: int
    score: float | None
    """The mean of the latest scores of graders, or else of callers; null where nobody has rated the run."""


class StepFigures(Reply):
    """A step of one of two runs that are compared."""

    n: int
    planned_worker: str
    worker: str
    state: str
    access: list[str]
    """`user`, and the places of the steps whose outputs it may see."""
    attempts: int
    cost_usd: float
    seconds: float
    input_tokens: int
    output_tokens: int


class ComparedStep(Reply):
    """The steps of two runs at one place: the round, counted from 1, and the position in its plan, counted from 0."""

    step: str
    first: StepFigures | None
    second: StepFigures | None
    same_subtask: bool | None
    same_output: bool | None
    """Null where a text is missing, was erased or may not be read."""


class Disclosed(Reply):
    """A recipient and what it was shown."""

    recipient: str
    role: Literal["worker", "conductor", "embedder"]
    step: str | None
    """The place of the step that it worked on; null for a conductor."""
    saw: list[str]
    """`user` for the caller's words, and places of steps."""


class ComparedDisclosures(Reply):
    """The disclosures of one of two runs that the other one has not."""

    both: int
    """The number of disclosures that are the same."""
    only_first: list[Disclosed]
    only_second: list[Disclosed]


class RunComparison(Reply):
    """Two runs of one task, the second against the first."""

    object: Literal["run.comparison"]
    first: RunFigures
    second: RunFigures
    difference: dict[str, float | None]
    """The second run's figure less the first one's; null where one is not known."""
    same_answer: bool | None
    """Null where an answer is missing, was erased or may not be read."""
    steps: list[ComparedStep]
    disclosures: ComparedDisclosures


class RunEvent(Reply):
    """One event of a run's journal."""

    object: Literal["run.event"]
    seq: int
    kind: str
    at: float
    body: dict[str, Any]


class EventList(Reply):
    """A page. `next` is the value of `after` for the page that follows; `last_id` serves as well."""

    object: Literal["list"]
    data: list[RunEvent]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next: str | None


class ProvenEntry(Reply):
    """An entry of the transparency log with its proof. `entry` is its exact text, which is hashed; `salt` opens its
    commitments, and is null once the run was pruned. Bytes are in base64."""

    index: int
    entry: str
    salt: str | None
    proof: list[str]


class RunProof(Reply):
    """The entries of the transparency log about a run, oldest first. `checkpoint` is a signed note; null before the
    first."""

    object: Literal["run.proof"]
    run: str
    events: int
    """Events of the run's journal; the last entry says how many of them are sealed."""
    checkpoint: str | None
    leaves: list[ProvenEntry]


class ErasedRun(Reply):
    """A run whose content was erased."""

    id: str
    object: Literal["run"]
    erased: Literal[True]


class StepInFull(AuditedStep):
    """A step with the messages that its worker got and wrote. A field is null where its content was erased."""

    object: Literal["run.step"]
    run: str
    erased: bool
    subtask: str | None
    messages: list[dict[str, Any]] | None
    output: str | None


class ApprovalWithheld(Reply):
    """The words that a plan could have shown to a step and does not."""

    user: bool
    """True if the caller's words are withheld."""
    steps: list[int]
    by: str | None
    """Who decided so, as in the graph of a run; null if nothing is withheld."""


class ApprovalStep(Reply):
    """A step of a plan that needs an approval."""

    n: int
    worker: str
    access: list[int | Literal["user"]]
    answers: bool
    tools: bool
    instruction: str | None
    """Empty where the conversation itself is the instruction; null where it was erased, or the key may not read it."""
    withheld: ApprovalWithheld


class ApprovalPlan(Reply):
    """A plan that needs an approval."""

    round: int
    topology: str
    steps: list[ApprovalStep]


class ApprovalDecision(Reply):
    """A decision, as the journal has it."""

    decision: Literal["approve", "refuse"]
    by: str
    """`key:` and the id of an API key, or `oidc:` and a person."""
    at: float
    reason: str | None
    workers: list[str]
    """The workers that the plan may call: its own, and replacements."""
    max_usd: float | None
    binding: str | None
    """The SHA-256 of the digest, who approved, and the bounds."""


class Approval(Reply):
    """A plan that needs an approval: what it would disclose and cost, and what was decided."""

    object: Literal["approval"]
    run: str
    tenant: str
    key: str
    key_name: str | None
    """The name of the key that asked for it; null if the key is not in the database."""
    tier: str
    labels: list[str]
    state: RunState
    status: Literal["waiting", "approved", "refused", "expired", "cancelled"]
    digest: str
    """The SHA-256 of exactly what is to be approved; a decision repeats it."""
    plan_digest: str
    task: str
    """The salted hash of the task."""
    catalog: str
    """The digest of the pool file when the plan was accepted."""
    reasons: list[str]
    asked_at: float
    expires_at: float
    on_expiry: Literal["refuse", "fallback-plan"]
    four_eyes: bool
    worst_case_usd: float | None
    """One call of each step at its full length."""
    spent_usd: float
    limit_usd: float
    estimate: Estimate | None
    """The likely cost and time of a plan that waits; null in lists, and where nothing can be said."""
    plan: ApprovalPlan
    discloses: dict[str, list[Any]]
    """The access that each worker would have: `user`, and numbers of steps."""
    workers: list[str]
    """The workers that an approval can allow as replacements."""
    decision: ApprovalDecision | None


class ApprovalList(Reply):
    """Plans that need an approval, those of the newest runs first."""

    object: Literal["list"]
    data: list[Approval]
    first_id: str | None
    """The run of the first plan."""
    last_id: str | None
    has_more: bool
    next: str | None
    """The value of `after` for the page that follows."""
