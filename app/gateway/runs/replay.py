"""`POST /v1/runs/{id}/replay` and `GET /v1/runs/{id}/compare/{other}`: a past run again, and two runs side by side.

A replay sends the content of a run to workers once more, so it needs what reading that content needs: the scope
`audit:read`, or the key that began the run. It belongs to the run's tenant, and to the key that asks for it. It is
admitted like any other run, so the labels, rules, prices, budgets and limits of today apply.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import Field

from app.core.plan.arms import tier_of
from app.core.pool.catalog import Tier
from app.core.pool.policy import Overrides, unknown_names
from app.core.rating.comparison import Comparison, RunFigures, Same, compare, compare_unreadable, figures
from app.core.rating.feedback import Feedback
from app.engine.runs import replays
from app.engine.runs.admission import Order
from app.engine.runs.replays import Changes
from app.errors import InvalidRequest
from app.gateway.http.callers import Caller
from app.gateway.http.context import GatewayContext
from app.gateway.runs import views
from app.gateway.wire.parameters import (
    WHOLE_POOL,
    Budget,
    Effort,
    Label,
    PoolChoice,
    WireModel,
    WorkerName,
    drop_nulls,
    is_capped,
    narrow_limits,
    nearest_effort,
    read_fields,
    resolve_tier,
)
from app.store.protocol import ContentReads, Journal, RunRow, TenantStore

WAIT_SECONDS = 600.0
"""The longest time for which a reply may wait for the end of a replay."""


class ReplayRequest(WireModel):
    """The changes against the run that is repeated; an empty object repeats its plan with the same workers."""

    model: Annotated[str, Field(max_length=256)] | None = None
    """The tier, an alias of one, or an arm, whose conductor plans anew. Its limits apply in place of the run's."""
    version: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    """The version of the conductor that plans anew, whichever is in force."""
    effort: Effort | None = None
    plan: dict[str, Any] | None = None
    """Another plan, in the form of `baton.plan`."""
    worker: WorkerName | None = None
    """The one worker that answers alone; with `from_step` the worker of that step and of all later ones."""
    from_step: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """The step from which on the plan is carried out; the outputs of the steps before it are kept."""
    labels: Annotated[list[Label], Field(max_length=16, fail_fast=True)] = []
    """Labels besides those of the run, all of which stay in force."""
    budget: Budget | None = None
    pool: PoolChoice | None = None
    explore: bool = False
    """True if a selector may leave its choice to chance."""
    wait: Annotated[float, Field(ge=0, le=WAIT_SECONDS)] = 0.0
    """Seconds for which the reply waits for the end of the replay."""


def read_request(body: Mapping[str, Any]) -> ReplayRequest:
    """Return the request; raises `InvalidRequest` naming the field."""
    return read_fields(ReplayRequest, drop_nulls(body))


async def order(
    context: GatewayContext, store: TenantStore, row: RunRow, caller: Caller, replay_request: ReplayRequest
) -> Order:
    """Return the order of the replay. Raises `InvalidRequest`, `Conflict` and `NotFound` with the reason why there is
    none."""
    earlier = await replays.read_run(store, await store.journal(row.id))
    admitted, catalog = earlier.state.admitted, context.catalog()
    tier = resolve_tier(catalog, caller.key, replay_request.model or row.tier)
    if replay_request.model is None:
        tier = tier_of(catalog, row.tier, row.model, admitted.served_by) or tier
    effort = nearest_effort(tier, replay_request.effort or admitted.effort or None)
    overrides = _check_workers(replay_request, tier)
    if replay_request.version is not None:
        await replays.check_version(context.store, tier, replay_request.version)
    new_order = Order(
        task=earlier.task,
        tier=tier,
        model=replay_request.model or row.model,
        effort=effort,
        limits=narrow_limits(tier.efforts[effort], replay_request.budget, caller.key.max_usd),
        tenant=row.tenant,
        key=caller.key.id,
        labels=caller.key.labels.union(replay_request.labels),
        overrides=overrides,
        explore=replay_request.explore,
        capped=is_capped(replay_request.budget, caller.key.max_usd),
    )
    return replays.as_replay(new_order, earlier, _changes(replay_request), catalog)


def _check_workers(replay_request: ReplayRequest, tier: Tier) -> Overrides:
    """Return the choice of workers. Raises `InvalidRequest` for a worker that is not in the tier's pool."""
    if replay_request.worker is not None and replay_request.worker not in tier.pool:
        raise InvalidRequest(
            f"The worker is not in the pool of {tier.name}; it has {', '.join(tier.pool)}.", param="worker"
        )
    overrides = (replay_request.pool or WHOLE_POOL).overrides()
    if unknown_names(tier, overrides):
        raise InvalidRequest(
            f"`pool` names a worker that is not in the pool of {tier.name}; it has {', '.join(tier.pool)}.",
            param="pool",
        )
    return overrides


def _changes(replay_request: ReplayRequest) -> Changes:
    """Return the changes against the run. A conductor plans anew where a tier or a version of one is named, unless the
    request says what is carried out."""
    names_conductor = replay_request.model is not None or replay_request.version is not None
    says_plan = replay_request.plan is not None or replay_request.worker is not None
    return Changes(
        replay_request.plan,
        replay_request.worker,
        replay_request.from_step,
        conducts=names_conductor and not says_plan,
        version=replay_request.version or "",
    )


# -- comparison


async def compare_with_replay(
    store: ContentReads,
    journals: tuple[Journal, Journal],
    ratings: tuple[Sequence[Feedback], Sequence[Feedback]],
    *,
    reads: bool,
) -> Comparison:
    """Compare two runs; texts are compared only if the caller `reads` the content of both."""
    first = figures(journals[0].events, ratings[0])
    second = figures(journals[1].events, ratings[1])
    same_texts: Same = compare_unreadable
    if reads:
        same_texts = await _same(store, first, second)
    return compare(first, second, same_texts)


async def _same(store: ContentReads, first: RunFigures, second: RunFigures) -> Same:
    """Return the test whether texts of two runs are equal."""
    return views.same_texts(await store.contents(first.run, first.refs), await store.contents(second.run, second.refs))
