"""A run as its auditor reads it, from the journal and nothing else: the row, the tree of steps, what each worker saw.

Ids, figures and reasons are metadata. Texts (what was asked, what was said) are content: they are looked up in the
content store, and where they were erased the field is null and `erased` says so.
"""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from app.core.message.chat import summed
from app.core.pool.catalog import MILLION
from app.core.rating.feedback import Feedback
from app.core.run.bill import bill
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    PlanOpened,
    PlanStep,
    StepDone,
    StepFailed,
    dated,
    facts,
)
from app.core.run.facts import PassedOver
from app.core.run.labels import Flow
from app.core.run.state import RunState, fold
from app.core.run.trace import continued
from app.engine.calls.step_request import see
from app.errors import NotFound
from app.gateway.chat.reply import dollars, figures, usage_of
from app.gateway.runs import exchanges
from app.store.protocol import ContentReads, Journal, Ledger, RunRow


def summary(row: RunRow) -> dict[str, Any]:
    """A run as lists show it."""
    return {
        "id": row.id,
        "object": "run",
        "tenant": row.tenant,
        "key": row.key,
        "tier": row.tier,
        "model": row.model,
        "state": row.state,
        "created_at": row.created_at,
        "ended_at": row.ended_at,
        "deadline": row.deadline,
        "topology": row.topology,
        "degraded": row.degraded,
        "steps": row.steps,
        "spent": _ledger(row.spent),
        "held": _ledger(row.held),
        "cap": _ledger(row.cap),
        "error": row.error,
        "origin": {"kind": row.origin_kind, "run": row.origin_run} if row.origin_kind else None,
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {"usd": dollars(ledger.usd), "tokens": ledger.tokens}


def whole(row: RunRow, journal: Journal, given: Sequence[Feedback] = ()) -> dict[str, Any]:
    """A run with everything that is known of it but its content, and the ratings that it was given."""
    state = fold(journal.events)
    admitted = state.admitted
    split = bill(state)
    limits = asdict(admitted.limits)
    return summary(row) | {
        "request_id": admitted.request_id or None,
        "trace_id": continued(admitted.trace, state.turn.trace).id or None,
        "erased": not journal.salt,
        "seq": state.seq,
        "effort": admitted.effort,
        "limits": limits | {"usd": limits["usd"] / MILLION},
        "labels": sorted(admitted.labels),
        "overrides": None,
        "pool": list(admitted.pool),
        "excluded": dict(admitted.excluded),
        "catalog": admitted.catalog,
        "ignored": list(admitted.ignored),
        "conductor": admitted.conductor,
        "cancel_asked": state.cancel_asked,
        "rounds": state.rounds,
        "proposals": _proposals(state, journal.events),
        "steps": [_step(state, n, journal.events) for n in state.steps],
        "turns": exchanges.turns(state, journal.events),
        "usage": usage_of(split),
        "total_usage": figures(split.total),
        "cost_usd": dollars(split.usd),
        "end": state.end.to_json() if state.end is not None else {},
        "feedback": ratings(given),
    }


def _proposals(state: RunState, events: Sequence[Event]) -> list[dict[str, Any]]:
    shown = []
    for one in state.all_proposals:
        opened = next((fact for fact in facts(events, PlanOpened) if fact.proposal == one.number), None)
        planned = [fact for fact in facts(events, PlanStep) if fact.proposal == one.number]
        calls = [
            _attempt(at, intent, events)
            for at, intent in dated(events, CallIntended)
            if intent.n is None and intent.attempt == one.number + 1
        ]
        shown.append(
            {
                "number": one.number,
                "mode": one.mode,
                "round": one.round,
                "parent": one.parent,
                "conductor": one.conductor,
                "state": one.state,
                "outage": one.outage,
                "reasons": list(one.reasons),
                "topology": one.topology or None,
                "decision": opened.decision if opened is not None else None,
                "order": list(opened.order) if opened is not None else None,
                "steps": [fact.n for fact in planned],
                "probabilities": {str(fact.n): fact.probability for fact in planned},
                "attempts": [call for call in calls if call["id"] == one.call] or calls,
            }
        )
    return shown


def _step(state: RunState, n: int, events: Sequence[Event]) -> dict[str, Any]:
    step = state.steps[n]
    calls = [call for call in state.calls.values() if call.step == n]
    planned = next((fact for fact in facts(events, PlanStep) if fact.n == n), None)
    proposal = next(one for one in state.all_proposals if one.number == step.proposal)
    failed = next((fact for fact in facts(events, StepFailed) if fact.n == n), None)
    intents = [(at, intent) for at, intent in dated(events, CallIntended) if intent.n == n]
    ends = [at for at, fact in dated(events, StepDone) if fact.n == n]
    return {
        "n": n,
        "proposal": step.proposal,
        "round": proposal.round,
        "parent": proposal.parent,
        "worker": step.worker,
        "planned_worker": planned.worker if planned is not None else step.worker,
        "kept_from": _kept_from(events, n),
        "probability": planned.probability if planned is not None else None,
        "access": step.access.as_list(),
        "labels": sorted(Flow(state).readings[n].labels),
        "declassified": sorted(step.output_lost),
        "tools": step.tools,
        "state": step.state,
        "error": step.error or None,
        "passed_over": _passed_over(failed.passed_over) if failed is not None else [],
        "chars": step.chars,
        "finish": step.finish or None,
        "started_at": intents[0][0] if intents else None,
        "ended_at": ends[0] if ends else None,
        "usage": figures(summed(call.usage for call in calls)),
        "cost_usd": dollars(sum(call.usd for call in calls)),
        "seconds": sum(call.seconds for call in calls),
        "attempts": [_attempt(at, intent, events) for at, intent in intents],
        "exchanges": exchanges.exchanges(step, events),
        "detail": f"/v1/runs/{state.run}/steps/{n}",
    }


def _kept_from(events: Sequence[Event], n: int) -> dict[str, Any] | None:
    """The step of an earlier run whose output this one has; None if it was called."""
    done = next((fact for fact in facts(events, StepDone) if fact.n == n and fact.origin_run), None)
    return {"run": done.origin_run, "step": done.origin_step} if done is not None else None


def _passed_over(those: PassedOver) -> list[dict[str, str]]:
    return [{"worker": worker, "reason": reason} for worker, reason in those]


def _attempt(at: float, intent: CallIntended, events: Sequence[Event]) -> dict[str, Any]:
    """An intent with its outcome, if it has one yet."""
    shown: dict[str, Any] = {
        "id": intent.call,
        "attempt": intent.attempt,
        "worker": intent.worker,
        "provider": intent.provider,
        "endpoint": intent.endpoint or None,
        "model": intent.model,
        "version": intent.version or None,
        "at": at,
        "access": intent.access.as_list(),
        "request": intent.request,
        "held": {"usd": dollars(intent.usd_held), "tokens": intent.tokens_held},
        "max_tokens": intent.max_tokens,
        "wanted_tokens": intent.wanted_tokens or None,
        "passed_over": _passed_over(intent.passed_over),
        "despite": intent.despite or None,
        "outcome": None,
    }
    for finished in facts(events, CallFinished):
        if finished.call == intent.call:
            shown |= _outcome(finished)
    return shown


def _outcome(finished: CallFinished) -> dict[str, Any]:
    return {
        "outcome": finished.outcome,
        "error": finished.error,
        "blamed": finished.blamed if finished.blamed != "silent" else None,
        "retry_after": finished.retry_after,
        "reason": finished.reason or None,
        "http_status": finished.http_status,
        "provider_code": finished.provider_code or None,
        "provider_request_id": finished.request_id or None,
        "excerpt": finished.excerpt or None,
        "usage": figures(finished.usage),
        "cost_usd": dollars(finished.usd),
        "seconds": finished.seconds,
        "first_delta_seconds": finished.first,
        "finish": finished.finish or None,
        "refused": finished.refused,
    }


async def step_in_full(store: ContentReads, state: RunState, events: Sequence[Event], n: int) -> dict[str, Any]:
    """A step with the exact messages that its worker saw, its subtask, its output, and what each attempt said."""
    step = state.steps[n]
    outputs = {fact.call: fact.output for fact in facts(events, CallFinished) if fact.n == n}
    wanted = {step.subtask, step.output, *outputs.values(), *exchanges.refs(step)} - {""}
    texts = {
        ref: body.decode("utf-8", "replace") for ref, body in (await store.contents(state.run, sorted(wanted))).items()
    }
    texts[""] = ""
    messages: list[dict[str, Any]] | None
    try:
        messages = [exchanges.message(message) for message in await see(store, state, n)]
    except NotFound:
        messages = None
    shown = _step(state, n, events)
    for attempt in shown["attempts"]:
        attempt["output"] = texts.get(outputs.get(attempt["id"], ""))
    return shown | {
        "object": "run.step",
        "run": state.run,
        "erased": messages is None or not wanted <= set(texts),
        "subtask": texts.get(step.subtask),
        "messages": messages,
        "exchanges": exchanges.full(step, events, texts),
        "output": texts.get(step.output),
    }


def rating(one: Feedback) -> dict[str, Any]:
    """A rating without its comment, which is content."""
    return {
        "id": one.id,
        "at": one.at,
        "kind": one.kind,
        "source": one.source,
        "version": one.version or None,
        "score": one.score,
        "label": one.label or None,
        "commented": bool(one.comment),
    }


def ratings(given: Sequence[Feedback]) -> dict[str, list[dict[str, Any]]]:
    """All ratings of a run by kind, oldest first: by callers, by graders, and from what callers did."""
    listed: dict[str, list[dict[str, Any]]] = {"explicit": [], "grader": [], "implicit": []}
    for one in given:
        listed[one.kind].append(rating(one))
    return listed
