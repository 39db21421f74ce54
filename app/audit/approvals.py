"""Rules about approvals: nothing of a plan that needs one is executed without it, and it is for exactly that plan.

The digests are computed here anew, from the events alone.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from app.audit.audited_run import AuditedRun, Call, Event, Proposal, Step
from app.audit.report import Violation
from app.core.run.kinds import Kind

DIGEST_LIMITS = ("attempts", "depth", "fan_out", "output_tokens", "rounds", "steps", "tokens")
"""The limits that are part of a plan's digest under their own names."""
ROUNDING_SECONDS = 5.0
"""Seconds that may pass between choosing a time and writing it."""


def check_approvals(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    terms = run.admission.get("approval")
    if not terms:
        for event in run.approvals:
            yield run.violation("approval-wrong", event.seq, f"{event.kind.value} in a run without terms of approval")
        return
    needing = plans_needing_approval(run, terms)
    yield from _check_decisions(run, needing)
    for proposal in run.proposals:
        approval = approval_of(run, proposal) if proposal.number in needing else None
        for step in proposal.steps:
            yield from _check_execution(run, proposal, step, approval, needed=proposal.number in needing)
    for call in run.calls.values():
        yield from _check_call(run, call, terms, needing)


def plans_needing_approval(run: AuditedRun, terms: Mapping[str, Any]) -> Mapping[int, Event]:
    """Return the acceptances of the plans that need an approval, by the numbers of their proposals."""
    acceptances: dict[int, Event] = {}
    for proposal in run.proposals:
        verdict = proposal.verdicts[0] if proposal.verdicts else None
        if verdict is None or verdict.kind is not Kind.PLAN_ACCEPTED or not proposal.steps:
            continue
        workers = {step.plan.body["worker"] for step in proposal.steps}
        names_worker = bool(workers & set(terms.get("workers", ())))
        follows_another = any(not _has_expired_before(run, number, verdict.seq) for number in acceptances)
        if terms.get("reasons") or names_worker or follows_another or _is_above_price(run, terms, verdict):
            acceptances[proposal.number] = verdict
    return acceptances


def _is_above_price(run: AuditedRun, terms: Mapping[str, Any], acceptance: Event) -> bool:
    """Return True if a plan, with what the run has spent before, may cost more than the terms allow unasked. A plan
    without a known price counts as too expensive."""
    limit, price = terms.get("above_usd"), acceptance.body.get("price")
    if limit is None:
        return False
    return price is None or bool(_spent_before(run, acceptance.seq) + price > limit)


def _has_expired_before(run: AuditedRun, number: int, seq: int) -> bool:
    """Return True if the wait for the approval of a plan had ended without one before an event."""
    expiry = run.proposals[number].approval_expiry
    return expiry is not None and expiry.seq < seq


def _spent_before(run: AuditedRun, seq: int) -> int:
    """Return the micro-dollars of the calls that had ended before an event."""
    ended = [call.outcome for call in run.calls.values() if call.outcome is not None]
    return sum(int(outcome.body["usd"]) for outcome in ended if outcome.seq < seq)


def approval_of(run: AuditedRun, proposal: Proposal) -> Event | None:
    """Return the approval of a plan; None if it was not approved."""
    for event in run.approvals:
        if event.kind is Kind.APPROVED and event.body["proposal"] == proposal.number:
            return event
    return None


def _check_decisions(run: AuditedRun, needing: Mapping[int, Event]) -> Iterator[Violation]:
    """Each question is about its plan, and each decision is one on the question before it, made in time."""
    latest_question: Event | None = None
    if run.approvals and run.admission["preview"]:
        yield run.violation("approval-wrong", run.approvals[0].seq, "a preview asks for an approval")
    for event in run.approvals:
        body = event.body
        if event.kind is Kind.AWAITING_APPROVAL:
            latest_question = event
            if body["proposal"] not in needing:
                yield run.violation("approval-wrong", event.seq, f"plan {body['proposal']} needs no approval")
            else:
                yield from _check_question(run, event, needing[body["proposal"]])
            continue
        question = latest_question.body if latest_question is not None else {}
        has_other_digest = "digest" in body and body["digest"] != question.get("digest")
        if body["proposal"] != question.get("proposal") or has_other_digest:
            yield run.violation("approval-wrong", event.seq, "the decision is not about what was asked last")
        elif event.kind is Kind.APPROVED:
            yield from _check_approval(run, event, question)


def _check_question(run: AuditedRun, event: Event, accepted: Event) -> Iterator[Violation]:
    """A question says what its plan would disclose and has cost, and waits as long as the terms say."""
    body, proposal = event.body, run.proposals[event.body["proposal"]]
    if (body["plan"], body["digest"]) != _digests(run, event):
        yield run.violation("approval-wrong", event.seq, "the digest is not that of what is to be approved")
    entries_by_worker: dict[str, list[Any]] = {}
    for step in proposal.steps:
        if step.is_taken_over:
            continue
        entries = entries_by_worker.setdefault(step.plan.body["worker"], [])
        entries += [entry for entry in step.plan.body["access"] if entry not in entries]
    stated = {
        "price": accepted.body.get("price"),
        "usd": _spent_before(run, event.seq),
        "turn": run.turn_at(event.seq).number,
        "discloses": entries_by_worker,
    }
    for name, value in stated.items():
        if body[name] != value:
            yield run.violation("approval-wrong", event.seq, f"{name} is not what the events make it")
    wait = run.admission["approval"].get("seconds", 0.0)
    if abs(body["until"] - event.at - wait) > ROUNDING_SECONDS:
        yield run.violation(
            "approval-wrong", event.seq, f"the wait is {body['until'] - event.at:.1f} s long, not {wait:.1f}"
        )


def _check_approval(run: AuditedRun, event: Event, question: Mapping[str, Any]) -> Iterator[Violation]:
    body = event.body
    if abs(body["deadline"] - event.at - question["seconds"]) > ROUNDING_SECONDS:
        yield run.violation("approval-wrong", event.seq, "the turn has not the time that was left")
    if event.at >= question["until"]:
        yield run.violation("approval-wrong", event.seq, "the approval came after the wait was over")
    if any(question["workers"].get(name) != mark for name, mark in body["workers"].items()):
        yield run.violation("approval-wrong", event.seq, "the approval allows a worker that the question does not name")
    bound = {
        "subject": body["digest"],
        "by": body["by"],
        "workers": sorted(body["workers"]),
        "max_usd_micros": body["max_usd"],
        "decision": "approve",
    }
    if _hash(bound) != body["binding"]:
        yield run.violation("approval-wrong", event.seq, "who approved, or what is allowed, is not what was bound")
    if body["max_usd"] > run.limits["usd"]:
        yield run.violation("approval-wrong", event.seq, "the approval allows more than the run may cost")


def _check_execution(
    run: AuditedRun, proposal: Proposal, step: Step, approval: Event | None, *, needed: bool
) -> Iterator[Violation]:
    """No step of a plan begins before the plan is accepted, and approved if it needs that."""
    accepted = proposal.verdicts[0].seq if proposal.verdicts else None
    for event in step.events:
        begins = event.kind in (Kind.STEP_QUEUED, Kind.CALL_INTENDED, Kind.PLAN_OPENED)
        if not begins:
            continue
        if accepted is None or event.seq < accepted:
            yield run.violation("unapproved", event.seq, f"step {step.n} begins before its plan can be approved")
        elif needed and (approval is None or event.seq < approval.seq):
            yield run.violation("unapproved", event.seq, f"step {step.n} begins without an approval of its plan")


def _check_call(
    run: AuditedRun, call: Call, terms: Mapping[str, Any], needing: Mapping[int, Event]
) -> Iterator[Violation]:
    """A step calls only workers that its approval names, or that need none."""
    step = run.step_of(call)
    if step is None:
        return
    proposal, worker = run.proposals[step.plan.body["proposal"]], call.intent.body["worker"]
    approval = approval_of(run, proposal) if proposal.number in needing else None
    if approval is not None and worker not in approval.body["workers"]:
        yield run.violation("unapproved", call.intent.seq, f"{call.id} calls a worker that the approval does not name")
    elif proposal.number not in needing and worker in terms.get("workers", ()):
        yield run.violation("unapproved", call.intent.seq, f"{call.id} calls a worker that needs an approval")


def _digests(run: AuditedRun, question: Event) -> tuple[str, str]:
    """Return the digests of the plan, and of all that is to be approved."""
    body, proposal = question.body, run.proposals[question.body["proposal"]]
    base = int(proposal.opening.body["base"])
    limits = {name: run.limits.get(name, 0) for name in DIGEST_LIMITS}
    limits |= {"milliseconds": round(run.limits["seconds"] * 1000), "usd_micros": run.limits["usd"]}
    plan = {
        "version": 1,
        "topology": proposal.verdicts[0].body["topology"],
        "steps": [_step(step, base) for step in proposal.steps],
        "limits": limits,
    }
    subject = {
        "version": 1,
        "run": run.id,
        "task": run.admission["task"],
        "plan": _hash(plan),
        "proposal": proposal.number,
        "pool": body["catalog"],
        "price_usd_micros": body["price"],
        "workers": body["workers"],
    }
    return _hash(plan), _hash(subject)


def _step(step: Step, base: int) -> Mapping[str, Any]:
    body = step.plan.body
    inputs = sorted(set(step.inputs))
    access: list[Any] = ["user"] if "user" in body["access"] else []
    access += [f"run:{n}" for n in inputs if n < base]
    access += [n - base for n in inputs if n >= base]
    return {
        "worker": body["worker"],
        "instruction": body["subtask"],
        "access": access,
        "answers": body["answers"],
        "tools": bool(body.get("tools")),
    }


def _hash(form: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(form, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
