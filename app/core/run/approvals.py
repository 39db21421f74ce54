"""Approvals of plans: which plans need one, what exactly is approved, and what an approval allows.

A plan of a run with `ApprovalTerms` is judged when it is accepted. If it needs an approval, none of its steps is queued
before there is one: `state.advance` refuses `step.queued` and `call.intended` of such a step, so that no writer and no
journal gets past it, and `progress.decide` ends the run's wait with `run.awaiting_approval`.

    subject  = SHA-256 of the run, its task, the plan's digest, the pool's version, the workers and the price
    binding  = SHA-256 of the subject, the decision, who decided, the workers and the price that are allowed

A worker is named with a fingerprint of what matters about it. One whose provider, model, endpoint or price has changed
since is another one, and is not called under the approval.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Any

from msgspec import Struct

from app.core.plan.digest import digest
from app.core.pool.catalog import ApprovalTerms, Catalog, Price, Worker
from app.core.pool.policy import NOT_APPROVED
from app.core.run.events import Event, RunApproved, RunAwaitingApproval, RunEnd, RunRefused, facts_with_times
from app.core.run.kinds import TERMINAL, Kind

PRICE, FURTHER = "price", "further_plan"
"""Reasons: the plan may cost more than its run may without an approval; an earlier plan of the run needed one."""
EXPIRED, REFUSED = "approval_expired", "approval_refused"
"""The errors of runs whose plan was not approved in time, or was refused."""


class Approval(Struct, frozen=True):
    """The approval of one plan. `max_usd` caps what the run may spend in all, in micro-dollars."""

    digest: str
    """The subject that was approved."""
    workers: Mapping[str, str]
    """The workers that steps of the plan may call, planned ones and replacements, each with its fingerprint."""
    max_usd: int


def approval_reasons(
    terms: ApprovalTerms, workers: Iterable[str], price: int | None, spent: int, *, further: bool
) -> tuple[str, ...]:
    """Return why a plan with steps by these workers needs an approval; () if it needs none.

    `price` is the worst case of its steps and `spent` the cost of the run so far, in micro-dollars. A price that is not
    known counts as too high. `further` says that an earlier plan of the run needed an approval.
    """
    reasons = list(terms.reasons)
    worker_names = [name for name in dict.fromkeys(workers) if name in terms.workers]
    reasons += [f"worker:{name}" for name in worker_names]
    if terms.above_usd is not None and (price is None or spent + price > terms.above_usd):
        reasons.append(PRICE)
    if further:
        reasons.append(FURTHER)
    return tuple(reasons)


def fingerprint(catalog: Catalog, worker: Worker) -> str:
    """Return the SHA-256 of what decides who reads the words and what they cost, shortened to 32 digits."""
    provider = catalog.providers.get(worker.provider)
    places = [] if provider is None else [provider.base_url, *[endpoint.base_url for endpoint in provider.endpoints]]
    price = _rates(worker.price)
    if worker.price.long is not None:
        price += [worker.price.long_after, *_rates(worker.price.long)]
    identity = [worker.provider, worker.model, places, worker.card.region, worker.card.retention, price]
    return sha256(json.dumps(identity).encode()).hexdigest()[:32]


def _rates(price: Price) -> list[int | None]:
    return [price.input, price.output, price.cached, price.written, price.reasoning]


def fingerprints(catalog: Catalog, names: Iterable[str]) -> dict[str, str]:
    """Return the fingerprint of each of these workers that the catalog has, by name."""
    workers = catalog.workers
    return {name: fingerprint(catalog, workers[name]) for name in names if name in workers}


def subject_digest(run: str, task: str, question: RunAwaitingApproval) -> str:
    """Return the SHA-256 of exactly what is to be approved in a run. `task` is the ref of its task."""
    form: dict[str, Any] = {
        "version": 1,
        "run": run,
        "task": task,
        "plan": question.plan,
        "proposal": question.proposal,
        "pool": question.catalog,
        "price_usd_micros": question.price,
        "workers": dict(question.workers),
    }
    return digest(form)


def binding_digest(subject: str, by: str, workers: Iterable[str], max_usd: int) -> str:
    """Return the SHA-256 of an approval: what was approved, by whom, and within which bounds."""
    form = {"subject": subject, "by": by, "workers": sorted(workers), "max_usd_micros": max_usd, "decision": "approve"}
    return digest(form)


def find_decision(events: Sequence[Event], digest: str) -> tuple[float, RunApproved | RunRefused] | None:
    """Return the decision on the plan of this digest with its time; None without any."""
    decisions: list[tuple[float, RunApproved | RunRefused]] = [
        *facts_with_times(events, RunApproved),
        *facts_with_times(events, RunRefused),
    ]
    for at, decision in decisions:
        if decision.digest == digest:
            return at, decision
    return None


def lacks_approval(events: Iterable[Event]) -> bool:
    """Return True if a plan of the run was refused, or not approved in time, also where the run has an answer all the
    same: that of a fallback, or of the round before."""
    for event in events:
        if event.kind in (Kind.REFUSED, Kind.APPROVAL_EXPIRED):
            return True
        if event.kind not in TERMINAL:
            continue
        end = event.fact
        if isinstance(end, RunEnd) and EXPIRED in (end.error, end.stopped):
            return True
    return False


def needs_approval(worker: Worker, terms: ApprovalTerms) -> bool:
    """Return True if no step may call a worker without an approval: the terms name it, or a price above which plans
    need one, and its own price is not known."""
    return worker.name in terms.workers or (terms.above_usd is not None and not worker.priced)


def exclude_unapproved(
    workers: Sequence[Worker], terms: ApprovalTerms, approval: Approval | None, catalog: Catalog
) -> tuple[list[Worker], tuple[tuple[str, str], ...]]:
    """Return the workers that a step may call, and why it may not call the others. `approval` is that of its plan."""
    if approval is None:
        barred = [worker for worker in workers if needs_approval(worker, terms)]
    else:
        approved_fingerprints = approval.workers
        barred = [
            worker for worker in workers if approved_fingerprints.get(worker.name) != fingerprint(catalog, worker)
        ]
    permitted = [worker for worker in workers if worker not in barred]
    return permitted, tuple([(worker.name, NOT_APPROVED) for worker in barred])
