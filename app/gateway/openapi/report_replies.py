"""Models of the reply of `/v1/reports`. They document, as those of `replies.py` do."""

from typing import Literal

from app.gateway.openapi.replies import Reply


class Sums(Reply):
    """The sums over some runs. Those without a verdict are in no cost per success."""

    runs: int
    unanswered: int
    """Runs that ended in another state than `succeeded`."""
    cost_usd: float
    judged: int
    """Runs with a verdict."""
    without_verdict: int
    successes: int
    judged_cost_usd: float
    cost_per_success_usd: float | None
    """`judged_cost_usd` divided by `successes`; null without a success."""


class GroupSums(Sums):
    """The sums of one group of a grouping."""

    by: str
    group: str | None
    """Null for the runs that have none of what is grouped by."""


class LeftOut(Reply):
    """Runs of the period that the report is not about."""

    open: int
    previews: int
    shadows: int
    """Runs that repeat others to compare them: `GET /v1/shadows/report` has their figures."""
    replays: int
    """Runs that repeat others at the request of a caller or an operator."""
    damaged: int
    """Runs whose journal cannot be read, because it was altered or the database is damaged: `baton audit check` names
    them."""


class OverRepresented(Reply):
    """A feature that is more frequent among the most expensive runs than among all."""

    feature: str
    value: str
    runs: int
    """The most expensive runs that have it."""
    of_runs: int
    """All runs that have it."""
    lift: float


class MostExpensiveRuns(Reply):
    """The most expensive runs and what they have in common."""

    share_of_runs: float
    runs: int
    cost_usd: float
    share_of_cost: float | None
    from_cost_usd: float | None
    """The cost of the cheapest of them."""
    features: list[OverRepresented]


class AccessLists(Reply):
    """Tokens that access lists kept out of calls."""

    method: str
    calls: int
    input_tokens: int
    spared_tokens: int
    spared_output_tokens: int
    spared_conversation_tokens: int
    calls_not_measured: int
    share_spared: float


class CheapestAlternative(Reply):
    """The cost of the calls of steps, and their cost with the cheapest worker of each run's pool."""

    method: str
    runs: int
    runs_without_prices: int
    cost_usd: float
    cheapest_cost_usd: float
    difference_usd: float
    cheapest_workers: dict[str, int]


class Failures(Reply):
    """Failures of one cause and shape."""

    level: Literal["call", "plan", "step", "run"]
    cause: str
    reason: str
    topology: str
    position: str
    """The step's place in its plan from 0; `plan` for planning."""
    worker: str
    count: int
    first_at: float
    last_at: float
    examples: list[str]


class Report(Reply):
    """The cost of the runs of a period, and their success."""

    object: Literal["report"]
    since: float
    until: float
    time_zone: str
    success: Literal["feedback", "graders", "signals"]
    threshold: float | None
    definition: str
    sources: dict[str, int]
    """The runs of each source of scores, or with each sign, by its name."""
    left_out: LeftOut
    total: Sums
    groups: list[GroupSums]
    dearest: MostExpensiveRuns
    access_lists: AccessLists
    cheapest: CheapestAlternative
    failures: list[Failures]
    failures_left_out: int


# -- shadows


class Bounds(Reply):
    """A value with the ends of its interval, which are null where nothing is known."""

    value: float | None
    low: float | None
    high: float | None


class ShadowFigure(Reply):
    """One figure of the live runs and of their shadows; means over users."""

    name: Literal["success", "agreement", "answered", "degraded", "cost_usd", "seconds", "recipients"]
    count: int
    """Pairs that have it."""
    users: int
    """Users among them; a run without one counts as one."""
    live: float | None
    candidate: float | None
    difference: Bounds
    relative: Bounds | None
    """The difference as a share of the live mean; null for shares, and where nothing is known of it."""


class PromotionCondition(Reply):
    """One condition of the tier's `promotion` with its evidence."""

    name: str
    limit: float
    outcome: Literal["holds", "breached", "open"]
    count: int
    found: Bounds | None
    needed: int | None
    """About how many pairs decide it if the difference stays what it is; null where that is not known."""


class ShadowCandidate(Reply):
    """A subject that was tried: a tier, a version of the conductor, or a worker."""

    subject: str
    pairs: int
    left_out: int
    """Pairs by which no condition is judged, because another version is live since, or the pool file has
    changed what served one of the two runs."""
    plans: int
    """Shadows that were only planned, which are in no pair."""
    valid_plans: int
    unfinished: int
    """Shadows that go on, were cancelled, or ran out of the budget of shadows."""
    figures: list[ShadowFigure]
    new_recipients: dict[str, int]
    """Recipients of callers' words in shadows and not in their runs, with the number of such pairs."""
    conditions: list[PromotionCondition]
    promotable: bool | None
    """Null where the tier states no conditions."""
    pairs_needed: int | None
    """About how many pairs decide all conditions."""


class ShadowReport(Reply):
    """A tier's live runs beside their shadows."""

    object: Literal["shadow_report"]
    tier: str
    since: float
    until: float
    shadow: str | None
    """The present subject in the pool file; null without one."""
    drawn: dict[str, int] | None
    """The number of runs that were drawn, by what became of them; null for a key of one tenant."""
    definitions: dict[str, str]
    candidates: list[ShadowCandidate]
