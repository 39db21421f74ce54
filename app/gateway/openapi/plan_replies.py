"""Models of the replies of `/v1/plans`. They document, as those of `replies.py` do."""

from typing import Any, Literal

from app.gateway.openapi.disclosure_replies import Disclosure, Saw, Withheld
from app.gateway.openapi.replies import Reply, RunState


class PlanSummary(Reply):
    """A plan as lists show it: without its texts."""

    id: str
    object: Literal["plan"]
    run: str
    """The run of its first revision, which was planned and not executed."""
    tier: str
    model: str
    state: RunState
    author: str
    """The id of the API key that asked for it."""
    author_name: str | None
    """The name of the key; null if it is not in the database."""
    created_at: float
    topology: str | None
    steps: int
    planning_cost_usd: float
    error: str | None


class PlanList(Reply):
    """A page. `next` is the value of `after` for the page that follows."""

    object: Literal["list"]
    data: list[PlanSummary]
    first_id: str | None
    last_id: str | None
    has_more: bool
    next: str | None


class PlanRevision(Reply):
    """One revision of a plan."""

    revision: int
    run: str
    author: str
    """The id of the API key that made it."""
    author_name: str | None
    """The name of the key; null if it is not in the database."""
    created_at: float
    conductor: str
    """The planner of this revision; `caller` for one that was sent as a plan or as edits."""


class Quantiles(Reply):
    """Three quantiles of what is expected, and the most that the limits allow."""

    p10: float
    p50: float
    p90: float
    worst: float


class StepEstimate(Reply):
    """The estimate of one step."""

    n: int
    worker: str
    basis: Literal["shape", "role", "worker", "others", "prices"]
    """The past steps that it rests on: of this worker at this place of the same shape, in the same role, in any role;
    of other workers in the same role; or none, so that it follows from prices and usual sizes."""
    samples: int
    """The number of these steps."""
    cost_usd: Quantiles
    seconds: Quantiles
    input_tokens: Quantiles
    output_tokens: Quantiles


class Estimate(Reply):
    """The likely cost and time of executing a plan. What making it has cost is not in it."""

    basis: Literal["history", "prices", "mixed"]
    runs: int
    """The number of past runs that were looked at."""
    cost_usd: Quantiles
    seconds: Quantiles
    unpriced: list[str]
    """The workers whose price is not known: what their steps cost is not in `cost_usd`."""
    steps: list[StepEstimate]


class PlannedWhy(Reply):
    """The reasons why a recipient would be shown what it sees, and why the rest is withheld."""

    planned_by: str
    """The author of the access list: `model`, `selector`, `fixed`, `random`, `caller` or `fallback`."""
    granted: list[str]
    """The entries of its access list: `user`, or `step:N`."""
    withheld: list[Withheld]


class PlannedDisclosure(Reply):
    """One step's disclosure to its worker, in the words of `/v1/disclosures`."""

    step: int
    recipient: str
    recipient_kind: Literal["worker"]
    provider: str | None
    """Null, as the next three, if the worker has left the pool file."""
    model: str | None
    region: str | None
    retention: str | None
    labels: list[str]
    """The labels of all that it reads."""
    saw: Saw
    why: PlannedWhy
    replacements: list[str]
    """Workers that may take over the step, and would be shown the same then."""
    refused: dict[str, str]
    """Workers of the pool that may not read this, each with the reason."""


class Plan(Reply):
    """A plan with one of its revisions."""

    id: str
    object: Literal["plan"]
    run: str
    """The run of its first revision, which was planned and not executed."""
    question: str
    """The texts of the caller's last message."""
    tier: str
    model: str
    effort: str
    conductor: str
    degraded: bool
    """True if a fallback planned."""
    revision: int
    revisions: list[PlanRevision]
    digest: str
    """The SHA-256 of the plan and its limits: what is executed has the same."""
    topology: str
    plan: dict[str, Any]
    """The plan as the `baton.plan` of a request takes it: `steps`, or three lists where these were asked for."""
    limits: dict[str, float]
    approval_needed: list[str]
    """The reasons why executing it waits for an approval: `requested`, `tier`, `label:NAME`, `worker:NAME` or `price`;
    empty if it needs none."""
    labels: list[str]
    pool: list[str]
    excluded: dict[str, str]
    """Workers of the tier that may not take part, each with the reason."""
    planning_cost_usd: float
    estimate: Estimate | None
    """Null if a worker of the plan has left the pool."""
    disclosures: list[PlannedDisclosure]
    """The disclosures that executing it would cause, if no worker has to be replaced."""
    disclosed: list[Disclosure]
    """The disclosures to conductors and embedders that making it has caused."""


class DeletedPlan(Reply):
    """A plan whose texts were erased, with all of its revisions."""

    id: str
    object: Literal["plan"]
    deleted: bool
