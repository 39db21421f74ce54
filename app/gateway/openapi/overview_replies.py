"""Models of the reply of `/v1/overview`. They document, as those of `replies.py` do."""

from typing import Literal

from app.gateway.openapi.replies import Reply, RunState


class Percentiles(Reply):
    """Nearest-rank percentiles in seconds; null without any value."""

    count: int
    p50: float | None
    p95: float | None
    p99: float | None


class FirstTokens(Percentiles):
    """Seconds from the sending of a call to its first word."""

    runs: int
    """The newest runs of the period, whose calls these are."""


class OverviewSums(Reply):
    """The sums over some runs; `success_rate` is that of those that have ended."""

    runs: int
    ended: int
    succeeded: int
    success_rate: float | None
    degraded: int
    cost_usd: float
    tokens: int


class OverviewBucket(OverviewSums):
    """The runs that began in a part of the period."""

    since: float
    until: float
    seconds: Percentiles


class TierSums(OverviewSums):
    """The runs of a tier."""

    tier: str
    seconds: Percentiles


class TopologySums(OverviewSums):
    """The runs whose latest plan has this shape; null where there is no plan yet."""

    topology: str | None


class OriginSums(OverviewSums):
    """The runs that follow from others in this way."""

    origin: Literal["none", "plan", "replay", "shadow"]


class Failure(Reply):
    """Runs that ended in this state with this error."""

    state: RunState
    error: str | None
    runs: int


class WorkerFigures(Reply):
    """The calls of a worker, a conductor or an embedder."""

    worker: str
    calls: int
    share: float
    outcomes: dict[str, int]
    success_rate: float | None
    """The share of `ok` among the calls that have ended and were not cancelled."""
    input_tokens: int
    output_tokens: int
    about_usd: float | None
    """About what its calls cost at present prices; null for a worker without a price."""
    rated_runs: int
    """Runs with a score in which it was sent something for a step."""
    pass_rate: float | None
    """The share of these whose mean score is 0.5 or more."""


class OpenRuns(Reply):
    """Runs that have not ended, whenever they began."""

    state: RunState
    runs: int
    oldest_since: float


class BudgetLeft(Reply):
    """A budget with the present window of the account that has spent most of it."""

    id: str
    tenant: str
    scope: Literal["key", "user", "team", "tenant", "shadow"]
    name: str
    period: Literal["hour", "day", "month"]
    since: float | None
    """The beginning of the present window; null if nothing was spent in it yet."""
    usd: float
    used_usd: float
    left_usd: float


class QueueState(Reply):
    """Tickets and runs that no engine has taken, counted up to `most`."""

    waiting: int
    most: int
    oldest_seconds: float | None


class BreakerState(Reply):
    """The breaker of a worker, as the engine of this process has measured it."""

    worker: str
    state: Literal["closed", "half_open", "open"]


class EjectedWorker(Reply):
    """A worker that a plan left out because its calls failed, with the latest such plan."""

    worker: str
    reason: str
    run: str
    at: float


class ConductorStanding(Reply):
    """The version of a conductor that is live, and its canary; null: the model that the pool file names, and none."""

    conductor: str
    live: str | None
    canary: str | None
    share: float


class LogFigures(Reply):
    """The state of the transparency log, with the root of the newest checkpoint in hexadecimal."""

    size: int
    root: str | None
    sealed_at: float | None
    waiting: int
    lag_seconds: float
    catching_up: bool


class LogCheck(Reply):
    """The findings about the newest checkpoint of the log."""

    object: Literal["log.check"]
    size: int
    root: str | None
    """In hexadecimal; null where the checkpoint could not be read."""
    signed_by: list[str]
    """The names of the keys that have signed it."""
    consistent: bool | None
    """True if the earlier log is its beginning; null where none was given."""
    valid: bool
    faults: list[str]


class ServiceState(Reply):
    """The state of what the process depends on."""

    database: Literal["healthy", "unavailable"]
    queue: Literal["healthy", "unavailable"]
    conductors: Literal["healthy", "unavailable"] | None
    """Null where no model conducts."""
    rehearsal: bool


class Overview(Reply):
    """Figures of a period. Of a part that is null and has to do with what tenants share, `hidden` says why."""

    object: Literal["overview"]
    period: Literal["hour", "day", "week", "month"]
    since: float
    until: float
    tenant: str | None
    """Null: of every tenant."""
    runs_since: float
    """The beginning of the runs that the figures are about: later than `since` if there are more than 20,000."""
    calls_since: float
    """The beginning of the calls that `workers` is about: later than `since` if there are more than 50,000."""
    total: OverviewSums
    seconds: Percentiles
    """From the admission to the end, of the runs that have succeeded."""
    first_token_seconds: FirstTokens
    buckets: list[OverviewBucket]
    tiers: list[TierSums]
    topologies: list[TopologySums]
    origins: list[OriginSums]
    failures: list[Failure]
    workers: list[WorkerFigures]
    ejected: list[EjectedWorker]
    """The workers that plans of the newest 300 runs left out, as the engines have journaled it."""
    open: list[OpenRuns]
    budgets: list[BudgetLeft] | None
    budgets_total: int | None
    """The number of budgets, of which the first 30 are listed."""
    queue: QueueState | None
    breakers: list[BreakerState] | None
    conductors: list[ConductorStanding] | None
    log: LogFigures | None
    service: ServiceState | None
    hidden: dict[str, str]
