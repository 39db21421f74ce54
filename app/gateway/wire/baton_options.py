"""Options of a run that every wire format has: the tier, the effort, and the `baton` field.

`order_of` makes an `Order` of them, in the same way for every format.
"""

from collections.abc import Mapping
from dataclasses import replace
from decimal import ROUND_FLOOR, Decimal
from typing import Annotated, Any, Final, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, create_model

from app.core.message.chat import Task
from app.core.plan.arms import tier_for
from app.core.plan.parse import from_lists, is_published
from app.core.pool.catalog import LIMITS, MILLION, Catalog, Limit, Limits, Tier
from app.core.pool.policy import Overrides
from app.engine.runs.admission import Order
from app.errors import InvalidRequest, NotFound, PlanRejected
from app.store.protocol import KeyRow

Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
"""A level of effort as requests name it, in ascending order."""
EFFORTS: Final[tuple[str, ...]] = get_args(Effort)

Label = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.:/-]{0,63}$")]
WorkerName = Annotated[str, StringConstraints(min_length=1, max_length=128)]


class WireModel(BaseModel):
    """Types as they stand in JSON, without conversions; unknown fields are errors."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


NARROWED: Final = tuple(one for one in LIMITS.values() if one.budget is not None)
"""The limits that a request may narrow."""


def _budget(limit: Limit) -> Any:
    """The type of one limit in a request's budget."""
    if limit.unit == "count":
        return Annotated[int, Field(ge=1, le=limit.budget)] | None
    return Annotated[float, Field(gt=0, le=limit.budget)] | None


_FIELDS: Final[dict[str, Any]] = {
    one.name: (_budget(one), Field(default=None, description=one.about)) for one in NARROWED
}
_Budget: Final[Any] = create_model("_Budget", __base__=WireModel, **_FIELDS)


class Budget(_Budget):  # type: ignore[misc]  # its fields are those of `NARROWED`
    """Limits of this run; they can only narrow those of the effort level."""


class PartOptions(WireModel):
    """The `baton` field of a message, of a part of one, or of a tool's result."""

    labels: Annotated[list[Label], Field(max_length=64, fail_fast=True)] = Field(default_factory=list)


def labels_on(*holders: BaseModel) -> frozenset[str]:
    """The labels that stand on messages, parts and results, and on whatever is inside them."""
    found: frozenset[str] = frozenset()
    for holder in holders:
        fields = holder.__dict__
        if (options := fields.get("baton")) is not None:
            found = found.union(options.labels)
        inner = fields.get("content") or fields.get("output") or fields.get("source")
        if inner is None or inner.__class__ is str:  # most messages are plain text
            continue
        found |= labels_on(*inner) if isinstance(inner, list) else labels_on(inner)
    return found


class PoolChoice(WireModel):
    """Which workers of the tier's pool may be used."""

    allow: Annotated[list[WorkerName], Field(max_length=256, fail_fast=True)] = []
    deny: Annotated[list[WorkerName], Field(max_length=256, fail_fast=True)] = []
    pin: WorkerName | None = None


class BatonOptions(WireModel):
    """The `baton` field of a request."""

    budget: Budget | None = None
    pool: PoolChoice | None = None
    labels: Annotated[list[Label], Field(max_length=16, fail_fast=True)] = Field(default_factory=list)
    plan: dict[str, Any] | None = None
    stream_steps: bool = False
    on_disconnect: Literal["cancel", "finish"] | None = None
    explore: bool = True
    """False: a selector takes what it holds for best, and leaves nothing to chance."""
    shadow: bool = True
    """False: the request is not tried a second time, under what its tier is compared with."""
    approval: Literal["required"] | None = None
    """`required`: no step of the run begins before somebody has approved its plan."""


NO_OPTIONS: Final = BatonOptions()
WHOLE_POOL: Final = PoolChoice()


def resolve_tier(catalog: Catalog, key: KeyRow, model: str) -> Tier:
    """The tier that a model id means for this key; `NotFound` (`model_not_found`) if there is none that it may use."""
    tier = tier_for(catalog, model)
    if tier is None or (key.tiers and tier.name not in key.tiers):
        raise NotFound(
            "The model does not exist or this key may not use it; GET /v1/models lists those that it may.",
            param="model",
            code="model_not_found",
        )
    return tier


def order_of(
    task: Task,
    tier: Tier,
    key: KeyRow,
    *,
    model: str,
    effort: str | None,
    extension: BatonOptions | None,
    streams: bool,
    ignored: tuple[str, ...],
    wire: Mapping[str, Any],
    on_messages: frozenset[str] = frozenset(),
    before: frozenset[str] = frozenset(),
) -> Order:
    """The order of a run for a request. `wire` holds what the reply depends on besides the run.

    `on_messages` are the labels that stand on messages and their parts; `before` those of the run whose conversation
    this one continues.
    """
    level = nearest_effort(tier, effort)
    extension = extension or NO_OPTIONS
    pool = extension.pool or WHOLE_POOL
    steps = streams and extension.stream_steps
    on_all = key.labels.union(extension.labels, before)
    return Order(
        task=task,
        tier=tier,
        model=model,
        effort=level,
        limits=narrowed(tier.efforts[level], extension.budget, key.max_usd),
        capped=is_capped(extension.budget, key.max_usd),
        tenant=key.tenant,
        key=key.id,
        labels=on_all | on_messages,
        on_messages=on_messages - on_all,
        overrides=Overrides(frozenset(pool.allow), frozenset(pool.deny), pool.pin),
        plan=_own_plan(extension.plan, tier),
        streams=streams,
        stream_steps=steps,
        ignored=ignored,
        explore=extension.explore,
        shadow=extension.shadow,
        approval=extension.approval == "required",
        on_disconnect=extension.on_disconnect,
        wire={**wire, **({"steps": True} if steps else {})},
    )


def _own_plan(plan: Mapping[str, Any] | None, tier: Tier) -> Mapping[str, Any] | None:
    """The caller's own plan, in Baton's own form; it may come in the published one."""
    if plan is None or not is_published(plan):
        return plan
    try:
        return from_lists(plan, tier.pool)
    except PlanRejected as rejected:
        message = f"The plan is not valid: {'; '.join(rejected.reasons)[:1_800]}"
        raise InvalidRequest(message, param="baton.plan", code="invalid_plan") from None


def nearest_effort(tier: Tier, asked: str | None) -> str:
    """The tier's level for an asked effort: the same, else the next lower one that it has, else its lowest.

    Raises `InvalidRequest` if no tier can have the level.
    """
    if asked is None or asked in tier.efforts:
        return asked or tier.effort
    if asked not in EFFORTS:
        raise InvalidRequest(f"There is no effort {asked!r}; the levels are {', '.join(EFFORTS)}.", param="effort")
    known = [level for level in EFFORTS if level in tier.efforts]
    below = [level for level in known if EFFORTS.index(level) < EFFORTS.index(asked)]
    if below:
        return below[-1]
    return (known or [tier.effort])[0]


def narrowed(limits: Limits, budget: Budget | None, max_usd: int | None) -> Limits:
    """`limits` narrowed by the request's budget and the key's cap; dollars become micro-dollars, rounded down."""
    if max_usd is None and budget is None:
        return limits
    lower: dict[str, Any] = {}
    for limit in NARROWED if budget is not None else ():
        asked = getattr(budget, limit.name)
        if asked is not None:
            lower[limit.name] = min(getattr(limits, limit.name), _micro(asked) if limit.unit == "usd" else asked)
    if max_usd is not None:
        lower["usd"] = min(lower.get("usd", limits.usd), max_usd)
    return replace(limits, **lower)


def is_capped(budget: Budget | None, max_usd: int | None) -> bool:
    """True if the request's budget or the key's cap says what the run may cost."""
    return max_usd is not None or (budget is not None and budget.usd is not None)


def _micro(dollars: float) -> int:
    return int((Decimal(repr(dollars)) * MILLION).to_integral_value(ROUND_FLOOR))
