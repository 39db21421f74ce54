"""What replies look like, for the API's own description (`description.py`); nothing is checked with these at run time.

A test compares real replies with them. Fields may be added to any of them but the error object without notice.
"""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

RunState = Literal[
    "admitted", "planned", "running", "awaiting_tool", "succeeded", "failed", "cancelled", "expired", "over_budget"
]


class Shape(BaseModel):
    """A JSON object of a reply: every field without a default is always there."""

    model_config = ConfigDict(strict=True)


class ErrorObject(BaseModel):
    """What is wrong, and which field of the request is at fault."""

    model_config = ConfigDict(strict=True, extra="forbid")

    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    """Every reply but a success: at most 4 KiB, without anything of the request in it."""

    model_config = ConfigDict(strict=True, extra="forbid")

    error: ErrorObject


class InputDetails(Shape):
    """Parts of the input, and the orchestration's beside it."""

    cached_tokens: int
    orchestration_input_tokens: int
    orchestration_input_cached_tokens: int


class OutputDetails(Shape):
    """Parts of the output, and the orchestration's beside it."""

    reasoning_tokens: int
    orchestration_output_tokens: int


class TokenUsage(Shape):
    """Total = prompt + completion, over what the caller can see; with the orchestration it is the journal's sum."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: InputDetails
    completion_tokens_details: OutputDetails


class Figures(Shape):
    """Tokens of one or several calls."""

    input: int
    cached: int
    output: int
    reasoning: int
    estimated: bool


class ProposalSummary(Shape):
    """What was proposed, and what became of it."""

    mode: Literal["first", "repair", "fallback"]
    round: int
    conductor: str
    state: Literal["open", "accepted", "rejected"]
    reasons: list[str]
    parent: int | None = None
    """The step that it is nested in."""


class StepSummary(Shape):
    """One step."""

    n: int
    worker: str
    access: list[int | Literal["user"]]
    state: Literal["waiting", "queued", "running", "awaiting_tool", "done", "failed", "skipped"]
    usage: Figures
    cost_usd: float
    seconds: float
    parent: int | None = None
    """The step that it is nested in."""


class RunExtension(Shape):
    """The `baton` field: how the answer came about."""

    run: str
    tier: str
    state: RunState
    topology: str | None
    conductor: str
    degraded: bool
    rounds: int
    proposals: list[ProposalSummary]
    steps: list[StepSummary]
    usage: Figures
    cost_usd: float
    audit: str
    rehearsal: bool = False


class Token(Shape):
    """A token with its natural-log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class DecodedToken(Token):
    """A token of the answer, and the likeliest in its place."""

    top_logprobs: list[Token]


class LogProbabilities(Shape):
    """Of the answer's tokens."""

    content: list[DecodedToken] | None
    refusal: list[DecodedToken] | None


class Function(Shape):
    """Which function is called, with what; `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Shape):
    """A call of one of the caller's functions."""

    id: str
    type: Literal["function"]
    function: Function


class Custom(Shape):
    """Which tool is called, with what text."""

    name: str
    input: str


class CustomCall(Shape):
    """A call of one of the caller's tools of free text."""

    id: str
    type: Literal["custom"]
    custom: Custom


class AnswerMessage(Shape):
    """The answer."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall | CustomCall] | None = None


class ChatChoice(Shape):
    """The one choice."""

    index: int
    message: AnswerMessage
    logprobs: LogProbabilities | None
    finish_reason: Literal["stop", "length", "content_filter", "tool_calls"]


class ChatCompletion(Shape):
    """OpenAI's `chat.completion`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: Literal["default"]
    system_fingerprint: str | None
    baton: RunExtension


class TextChoice(Shape):
    """The one choice."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length", "content_filter"]


class TextCompletion(Shape):
    """OpenAI's `text_completion`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage
    system_fingerprint: str | None
    baton: RunExtension


class Range(Shape):
    """Dollars per million tokens, over the pool."""

    min: float
    max: float


class Prices(Shape):
    """What the tier's workers cost."""

    input: Range
    cached: Range
    output: Range


class TierLimits(Shape):
    """What one run may use."""

    steps: int
    fan_out: int
    rounds: int
    depth: int
    attempts: int
    output_tokens: int
    tokens: int
    usd: float
    seconds: float


class TierExtension(Shape):
    """What is behind a model id."""

    tier: str
    alias: bool
    description: str
    conductor: str
    pool: list[str]
    effort: str
    efforts: dict[str, TierLimits]
    prices: Prices
    catalog: str
    rehearsal: bool


class Model(Shape):
    """A tier, or an alias of one, as OpenAI's model object."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    baton: TierExtension


class ModelList(Shape):
    """The models that the key may use."""

    object: Literal["list"]
    data: list[Model]


class Ledger(Shape):
    """Money and tokens."""

    usd: float
    tokens: int


class Run(Shape):
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
    spent: Ledger
    held: Ledger
    cap: Ledger
    error: str | None


class RunList(Shape):
    """A page; `next` is what `after` takes."""

    object: Literal["list"]
    data: list[Run]
    has_more: bool
    next: str | None


class Turn(Shape):
    """One of the caller's requests to a run: the first, or one that brought tool results."""

    number: int
    at: float
    deadline: float
    stream: bool
    ended_at: float | None
    finish: str | None
    results_until: float | None
    usage: Figures
    cost_usd: float


class Rating(Shape):
    """What somebody, or some rule, said of a run's answer; `score` is from 0 to 1."""

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


class Ratings(Shape):
    """What callers said, what graders found, and what callers did."""

    explicit: list[Rating]
    grader: list[Rating]
    implicit: list[Rating]


class WholeRun(Shape):
    """A run with everything that is known of it but its content."""

    id: str
    object: Literal["run"]
    state: RunState
    tier: str
    erased: bool
    seq: int
    labels: list[str]
    pool: list[str]
    excluded: dict[str, str]
    catalog: str
    ignored: list[str]
    cancel_asked: bool
    rounds: int
    proposals: list[dict[str, Any]]
    steps: list[StepSummary]
    turns: list[Turn]
    usage: TokenUsage
    total_usage: Figures
    cost_usd: float
    end: dict[str, Any]
    feedback: Ratings


class RunEvent(Shape):
    """One event of a run's journal."""

    object: Literal["run.event"]
    seq: int
    kind: str
    at: float
    body: dict[str, Any]


class EventList(Shape):
    """A page; `next` is what `after` takes."""

    object: Literal["list"]
    data: list[RunEvent]
    has_more: bool
    next: str | None


class StepInFull(StepSummary):
    """A step with what its worker saw and said; null where that was erased."""

    object: Literal["run.step"]
    run: str
    erased: bool
    subtask: str | None
    messages: list[dict[str, Any]] | None
    exchanges: list[dict[str, Any]]
    output: str | None
    attempts: list[dict[str, Any]]


class Health(Shape):
    """The process lives."""

    status: Literal["ok"]


class Readiness(Shape):
    """What can be reached."""

    status: Literal["ready", "degraded", "not_ready"]
    checks: dict[str, str]
