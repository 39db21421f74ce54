"""A plan as its caller sees it: the steps with their instructions, what they would disclose to whom, and what they are
likely to cost."""

from collections.abc import Sequence
from typing import Any

from msgspec import Struct

from app.core.message.chat import Task, Text
from app.core.plan.workflow import Step
from app.core.pool.catalog import Catalog, Worker
from app.core.pool.policy import exclusion
from app.core.pool.rules import Reading
from app.core.rating.forecast import History
from app.core.run.caller_view import bill, dollars
from app.core.run.recipients import Recipient
from app.core.run.visibility import LabelFlow
from app.gateway.plans.revisions import Plan, Revision, as_lists, as_value, digest_of, limits_of, plan_id
from app.gateway.runs import disclosures as ledger
from app.gateway.runs import forecasts
from app.store.protocol import Disclosure, RunRow


def summary(row: RunRow) -> dict[str, Any]:
    """Return a plan as lists show it: without its texts."""
    return {
        "id": plan_id(row.id),
        "object": "plan",
        "run": row.id,
        "tier": row.tier,
        "model": row.model,
        "state": row.state,
        "author": row.key,
        "created_at": row.created_at,
        "topology": row.topology,
        "steps": row.steps,
        "planning_cost_usd": dollars(row.spent.usd),
        "error": row.error,
    }


class RevisionContent(Struct, frozen=True):
    """The parts of a revision that are read to show it in full."""

    steps: tuple[Step, ...]
    task: Task
    history: History
    """The past steps from which its cost and time are estimated."""
    disclosed: Sequence[Disclosure]
    """The rows of the ledger that the making of the plan has added."""


def render_plan(
    catalog: Catalog, plan: Plan, revision: Revision, content: RevisionContent, *, lists: bool
) -> dict[str, Any]:
    """Return a plan with one of its revisions in full; with `lists` in the published form."""
    state, steps = revision.state, content.steps
    limits = limits_of(state.admitted.limits)
    if lists:
        plan_value = as_lists(steps, state.admitted.pool)
    else:
        plan_value = as_value(steps)
    approval_reasons: list[str] = []
    if state.proposal is not None:
        approval_reasons = list(state.proposal.needs)
    return {
        "id": plan.id,
        "object": "plan",
        "run": plan.run,
        "question": question(content.task),
        "tier": state.admitted.tier,
        "model": state.admitted.model,
        "effort": state.admitted.effort,
        "conductor": state.admitted.conductor,
        "degraded": state.degraded,
        "revision": revision.number,
        "revisions": [_revision(entry) for entry in plan.revisions if entry.stands],
        "digest": digest_of(revision, steps),
        "topology": state.topology,
        "plan": plan_value,
        "limits": {**limits.to_json(), "usd": dollars(limits.usd)},
        "approval_needed": approval_reasons,
        "labels": sorted(state.admitted.labels),
        "pool": list(state.admitted.pool),
        "excluded": dict(state.admitted.excluded),
        "planning_cost_usd": dollars(bill(plan.first.state).usd),
        "estimate": forecasts.estimate(forecasts.of_plan(catalog, content.task, steps, limits, content.history)),
        "disclosures": forecast_disclosures(catalog, revision, steps),
        "disclosed": [ledger.render_disclosure(row) for row in content.disclosed],
    }


def question(task: Task) -> str:
    """Return the texts of the caller's last message."""
    for message in reversed(task.messages):
        if message.role == "user":
            return "\n".join(part.text for part in message.parts if isinstance(part, Text))
    return ""


def _revision(revision: Revision) -> dict[str, Any]:
    state = revision.state
    return {
        "revision": revision.number,
        "run": state.run,
        "author": revision.author,
        "created_at": state.turn.at,
        "conductor": state.admitted.conductor,
    }


# -- disclosures


def forecast_disclosures(catalog: Catalog, revision: Revision, steps: Sequence[Step]) -> list[dict[str, Any]]:
    """Return the disclosures that a plan would cause, one for each step, in the words of the ledger of disclosures."""
    state = revision.state
    base = 0
    if state.proposal is not None:
        base = state.proposal.base
    readings = LabelFlow(state, catalog).readings
    pool = [catalog.workers[name] for name in state.admitted.pool if name in catalog.workers]
    disclosures: list[dict[str, Any]] = []
    for n, step in enumerate(steps):
        reading, worker = readings[n + base], catalog.workers.get(step.worker)
        disclosure = ledger.recipient(_recipient(n, step, worker, reading, state.admitted.conductor))
        disclosure["retention"] = None
        if worker is not None:
            disclosure["retention"] = worker.card.retention
        disclosure["why"]["granted"] = _describe_grants(step)
        disclosures.append(disclosure | _list_substitutes(pool, step.worker, reading))
    return disclosures


def _describe_grants(step: Step) -> list[str]:
    """Return what the access list of a step grants, in words."""
    grants: list[str] = []
    for entry in step.access.as_list():
        if isinstance(entry, str):
            grants.append(entry)
        else:
            grants.append(f"step:{entry}")
    return grants


def _recipient(n: int, step: Step, worker: Worker | None, reading: Reading, planned_by: str) -> Recipient:
    """Return the recipient of a planned step. `worker` is None if it has left the pool file."""
    provider, model, region = "", "", ""
    if worker is not None:
        provider, model, region = worker.provider, worker.model, worker.card.region or ""
    return Recipient(
        step=n,
        kind="worker",
        recipient=step.worker,
        provider=provider,
        model=model,
        region=region,
        labels=tuple(sorted(reading.labels)),
        saw_user=step.access.user,
        saw_steps=tuple(sorted(step.access.steps)),
        saw_results=False,
        unseen=(),
        planned_by=planned_by,
    )


def _list_substitutes(pool: Sequence[Worker], chosen: str, reading: Reading) -> dict[str, Any]:
    """Return the workers that may take over a step, and those that may not read what it reads."""
    reasons = {worker.name: exclusion(worker, reading) for worker in pool}
    return {
        "replacements": [name for name, reason in reasons.items() if not reason and name != chosen],
        "refused": {name: reason for name, reason in reasons.items() if reason},
    }
