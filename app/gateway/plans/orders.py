"""Orders of runs for plans: the preview that makes one, the preview of an edit, and the execution of a revision.

A revision and an execution take the task, the tier, the limits and the options of the plan's first revision, so that
what is executed is what was shown. What has changed since (a worker that is gone, a limit that was lowered, a label's
rule) is a refusal that says so, never another plan.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

import orjson
from msgspec.structs import replace

from app.core.message.chat import Task, labels_of
from app.core.plan.arms import tier_of
from app.core.plan.workflow import Step
from app.core.pool.catalog import LIMITS, REQUESTED, Catalog, Limits, Tier
from app.core.pool.policy import Overrides
from app.core.run.caller_view import find_returned_results
from app.engine.runs.admission import Order
from app.errors import BatonError, Conflict, Forbidden, InvalidRequest
from app.gateway.http.callers import Caller
from app.gateway.plans.requests import PlanRunRequest, invalid_plan_error
from app.gateway.plans.revisions import FORMAT, MOST_REVISIONS, Plan, Revision, as_value, digest_of, limits_of
from app.store.protocol import IdempotencyRecord, KeyRow

REFUSED = frozenset({"invalid_plan", "plan_rejected", "no_eligible_worker"})
"""The codes of errors with which an order's plan is refused at its admission."""
OUTDATED = "plan_outdated"


def to_preview(order: Order) -> Order:
    """Return the order of a request, for its plan alone. Raises `InvalidRequest` for the results of tool calls, which
    continue a run that has its plan."""
    if find_returned_results(order.task.messages) is not None:
        raise InvalidRequest(
            "The conversation ends with results of tool calls, which continue a run that has its plan already.",
            param="messages",
        )
    reply = {name: value for name, value in order.wire.items() if name not in ("steps", "background")}
    wire = {"format": FORMAT, "revision": 1, "reply": reply} | _pool(order.overrides)
    return replace(
        order,
        preview=True,
        streams=False,
        followed=True,
        stream_steps=False,
        limits=limits_of(order.limits),
        wire=wire,
        on_disconnect="finish",
    )


def _pool(overrides: Overrides) -> dict[str, Any]:
    """Return the request's choice of workers, for later revisions."""
    pool: dict[str, Any] = {}
    if overrides.allow:
        pool["allow"] = sorted(overrides.allow)
    if overrides.deny:
        pool["deny"] = sorted(overrides.deny)
    if overrides.pin:
        pool["pin"] = overrides.pin
    if not pool:
        return {}
    return {"pool": pool}


def to_revision(base: Order, plan: Plan, value: Mapping[str, Any], number: int) -> Order:
    """Return the order of an edited plan's preview."""
    wire = dict(plan.first.state.admitted.wire) | {"revision": number}
    return replace(
        base, preview=True, plan=value, wire=wire, on_disconnect="finish", origin_kind="plan", origin_run=plan.run
    )


def to_execution(base: Order, revision: Revision, steps: tuple[Step, ...], request: PlanRunRequest) -> Order:
    """Return the order that executes a revision as it stands, within the limit of its author's key. Raises `Conflict`
    where that would not be what was shown."""
    digest = digest_of(revision, steps)
    if request.digest is not None and request.digest != digest:
        raise Conflict(
            "The revision has another digest than the one that was sent; look at it again.",
            param="digest",
            code="digest_mismatch",
        )
    limits = limits_of(revision.state.admitted.limits)
    if base.limits.usd < limits.usd:
        raise outdated_error("this key may spend less than the plan's limit")
    reply = {name: value for name, value in base.wire.items() if name != "usage"}
    if request.stream_options is not None and request.stream_options.include_usage:
        reply["usage"] = True
    streams_steps = request.stream and request.stream_steps
    if streams_steps:
        reply["steps"] = True
    return replace(
        base,
        plan=as_value(steps),
        limits=limits,
        capped=base.capped or revision.state.admitted.capped,
        streams=request.stream,
        stream_steps=streams_steps,
        wire=reply,
        origin_kind="plan",
        origin_run=revision.state.run,
    )


def repeat_order(catalog: Catalog, caller: Caller, plan: Plan, revision: Revision, tenant: str, task: Task) -> Order:
    """Return the order of the plan's request, but without a plan of its own. Raises `Conflict` if it would be another
    one.

    It has the labels of the revision that is edited or executed: its author's key may have added some.
    """
    key, admitted = caller.key, plan.first.state.admitted
    if key.tenant != tenant:
        raise Forbidden("A plan is changed and executed with a key of its own tenant.")
    tier = _tier(catalog, key, plan)
    limits = _limits(tier, key, plan)
    pool_choice = admitted.wire.get("pool", {})
    overrides = Overrides(
        frozenset(pool_choice.get("allow", ())), frozenset(pool_choice.get("deny", ())), pool_choice.get("pin")
    )
    return Order(
        task=task,
        tier=tier,
        model=admitted.model,
        effort=admitted.effort,
        limits=limits,
        capped=admitted.capped or key.max_usd is not None,
        tenant=tenant,
        key=key.id,
        labels=revision.state.admitted.labels | key.labels,
        on_messages=labels_of(task.messages) - key.labels,
        overrides=_without_unknown_workers(overrides, tier),
        ignored=admitted.ignored,
        explore=admitted.explore,
        shadow=admitted.shadow,
        approval=admitted.approval is not None and REQUESTED in admitted.approval.reasons,
        wire=admitted.wire.get("reply", {}),
    )


def _without_unknown_workers(overrides: Overrides, tier: Tier) -> Overrides:
    """Without the names of workers that have left the pool, which cannot be chosen in any case."""
    pool = frozenset(tier.pool)
    if overrides.allow and not overrides.allow & pool:
        raise outdated_error("none of the workers that the request allowed is left in the pool")
    return Overrides(overrides.allow & pool, overrides.deny & pool, overrides.pin)


def _tier(catalog: Catalog, key: KeyRow, plan: Plan) -> Tier:
    admitted = plan.first.state.admitted
    tier = tier_of(catalog, admitted.tier, admitted.model, admitted.served_by)
    if tier is None or (key.tiers and tier.name not in key.tiers):
        raise outdated_error("its tier is gone, or this key may not use it")
    if admitted.effort not in tier.efforts:
        raise outdated_error("its tier no longer has its level of effort")
    pin = admitted.wire.get("pool", {}).get("pin")
    if pin is not None and pin not in tier.pool:
        raise outdated_error("the worker that the request pinned has left the pool")
    return tier


def _limits(tier: Tier, key: KeyRow, plan: Plan) -> Limits:
    """Return the limits of the plan, which those of the tier must still allow."""
    admitted = plan.first.state.admitted
    limits, effort_limits = limits_of(admitted.limits), tier.efforts[admitted.effort]
    lowered_limits: list[str] = []
    for name in LIMITS:
        if name in ("rounds", "depth"):  # a plan of the caller's has one round and nothing nested
            continue
        if getattr(limits, name) > getattr(effort_limits, name):
            lowered_limits.append(name)
    if lowered_limits:
        raise outdated_error(f"its tier now has lower limits: {', '.join(sorted(lowered_limits))}")
    if key.max_usd is not None and key.max_usd < limits.usd:
        return replace(limits, usd=key.max_usd)
    return limits


def outdated_error(reason: str) -> Conflict:
    """Return the refusal of a plan that cannot be executed any more as it was shown."""
    return Conflict(
        f"The plan cannot be used as it was shown, because the conditions have changed: {reason}. Make it anew with "
        "POST /v1/plans.",
        code=OUTDATED,
    )


def record_of_revision(plan: Plan, number: int, tenant: str, body: Mapping[str, Any]) -> IdempotencyRecord:
    """Return the idempotency record of a plan's next revision: of two authors who have seen the same one, one gets it.
    The same request sent again follows the revision that it has made."""
    name = hashlib.sha256(f"{tenant}\0{plan.id}\0{number}".encode()).hexdigest()
    fingerprint = hashlib.sha256(orjson.dumps(body, option=orjson.OPT_SORT_KEYS)).digest()
    return IdempotencyRecord(name, fingerprint, 0.0, tenant=tenant)


# -- refusals


def next_number(plan: Plan, base: Revision) -> int:
    """Return the number of the revision that follows this one. Raises `Conflict` if there is one already."""
    later = [revision for revision in plan.revisions if revision.number > base.number]
    if any(revision.stands or revision.is_open for revision in later):
        raise overtaken_error()
    if plan.revisions[-1].number >= MOST_REVISIONS:
        message = "The plan has as many revisions as a plan may have; make another one."
        raise Conflict(message, code="too_many_revisions")
    return plan.revisions[-1].number + 1


def overtaken_error() -> Conflict:
    """Return the refusal of an edit whose author has not seen the latest revision."""
    return Conflict(
        "Somebody has made a later revision of this plan; look at it with GET /v1/plans/{id}, and send your edit with "
        "its number.",
        param="revision",
        code="revision_conflict",
    )


def edit_error(error: InvalidRequest) -> BatonError:
    """Return the refusal of an edited plan, with the field of the plan that is at fault."""
    if error.param != "baton.plan":
        return error
    reasons = error.message.partition(": ")[2]
    return invalid_plan_error(reasons, reasons)


def changed_conditions_error(error: InvalidRequest) -> BatonError:
    """Return the refusal to execute a plan that was accepted when it was shown: what has changed is at fault."""
    if error.public_code not in REFUSED:
        return error
    return outdated_error(error.message.partition(": ")[2] or error.message)
