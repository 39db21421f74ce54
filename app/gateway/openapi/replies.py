"""Models of replies, which the routes name as their response models and which `/openapi.json` describes.

Replies are written as bytes and returned as they are: FastAPI documents these models and validates nothing with them.
Tests compare real replies with them. Fields may be added to any of them but the error object without notice.
"""

from typing import Literal

from pydantic import BaseModel, ConfigDict

RunState = Literal[
    "admitted",
    "planned",
    "running",
    "awaiting_tool",
    "awaiting_approval",
    "succeeded",
    "failed",
    "cancelled",
    "expired",
    "over_budget",
]


class Reply(BaseModel):
    """A JSON object of a reply. A field without a default is always present."""

    # Built when the document is first asked for: to build them all took an eighth of the start of a process.
    model_config = ConfigDict(strict=True, use_attribute_docstrings=True, defer_build=True)


class ErrorObject(Reply):
    """The fault, and the field of the request that is at fault."""

    model_config = ConfigDict(extra="forbid")

    message: str
    """A sentence that never contains a value of the request."""
    type: str
    """`invalid_request_error`, `server_error` or another of OpenAI's types."""
    param: str | None
    """The name of the field or parameter at fault."""
    code: str | None
    """A word for programs, such as `model_not_found`."""


class Error(Reply):
    """The body of every reply that is not a success: at most 4 KiB."""

    model_config = ConfigDict(extra="forbid")

    error: ErrorObject


class PromptDetails(Reply):
    """Parts of the input, and the orchestration's input, which is not part of it."""

    cached_tokens: int
    orchestration_input_tokens: int
    orchestration_input_cached_tokens: int


class CompletionDetails(Reply):
    """Parts of the output, and the orchestration's output, which is not part of it."""

    reasoning_tokens: int
    orchestration_output_tokens: int


class TokenUsage(Reply):
    """Tokens that the caller can see: total = prompt + completion. With the orchestration's it is the run's sum."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails


class Usage(Reply):
    """Tokens of one or several calls to workers."""

    input: int
    cached: int
    output: int
    reasoning: int
    estimated: bool
    """True if a worker reported no usage, so that it was estimated."""


class ProposalSummary(Reply):
    """A workflow that a conductor proposed, and whether it was accepted."""

    mode: Literal["first", "repair", "fallback"]
    round: int
    conductor: str
    state: Literal["open", "accepted", "rejected"]
    reasons: list[str]
    parent: int | None = None
    """The step that this is nested in."""


class StepSummary(Reply):
    """One step of the workflow."""

    n: int
    worker: str
    access: list[int | Literal["user"]]
    state: Literal["waiting", "queued", "running", "awaiting_tool", "done", "failed", "skipped"]
    usage: Usage
    cost_usd: float
    seconds: float
    parent: int | None = None
    """The step that this is nested in."""


class TurnUsage(Reply):
    """The part of a run that belongs to one request of its caller."""

    number: int
    usage: Usage
    cost_usd: float


class WaitingApproval(Reply):
    """A plan of the run waits for an approval: nothing of it was executed."""

    digest: str
    reasons: list[str]
    """`requested`, `tier`, `label:NAME`, `worker:NAME`, `price` or `further_plan`."""
    expires_at: float
    url: str
    """The path under which the plan is shown and decided on."""


class RunExtension(Reply):
    """The `baton` field of a reply: how the run produced the answer."""

    run: str
    tier: str
    state: RunState
    topology: str | None
    conductor: str
    degraded: bool
    rounds: int
    proposals: list[ProposalSummary]
    steps: list[StepSummary]
    usage: Usage
    cost_usd: float
    turn: TurnUsage
    audit: str
    """The path of the run's audit trail."""
    rehearsal: bool = False
    """True if no real provider was called."""
    approval: WaitingApproval | None = None
    """Only while the run is `awaiting_approval`."""


class Service(Reply):
    """The name of this service, and the paths of its API and of what describes it."""

    object: Literal["service"]
    name: str
    version: str
    api: str
    docs: str
    openapi: str


class Health(Reply):
    """The process is alive."""

    status: Literal["ok"]


class Readiness(Reply):
    """The state of what the process depends on."""

    status: Literal["ready", "degraded", "not_ready"]
    checks: dict[str, str]


class Identity(Reply):
    """The one who asks."""

    object: Literal["identity"]
    id: str
    via: Literal["key", "oidc"]
    tenant: str
    all_tenants: bool
    role: str | None
    scopes: list[str]
    expires_at: float | None
    csrf_token: str | None
    """For a person: the value of the header `x-csrf-token` that each change needs."""
