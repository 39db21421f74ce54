"""A run as its auditor reads it, from the journal and nothing else: the row, the tree of steps, what each worker saw.

Ids, figures and reasons are metadata. Texts (what was asked, what was said) are content: they are looked up in the
content store, and where they were erased the field is null and `erased` says so.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import asdict

from app.core.message.chat import sum_usages
from app.core.pool.catalog import MILLION, Amount
from app.core.rating.feedback import Feedback
from app.core.run.caller_view import bill, dollars, usage_figures, usage_of
from app.core.run.events import (
    CallFinished,
    CallIntended,
    Event,
    PassedOver,
    PlanOpened,
    PlanStep,
    StepDone,
    StepFailed,
    facts,
    facts_with_times,
)
from app.core.run.fold import fold
from app.core.run.identifiers import trace_of_turn
from app.core.run.recipients import EMBEDDING_TEMPLATE, proposal_of_call
from app.core.run.state import Call, Proposal, RunState
from app.core.run.visibility import LabelFlow
from app.engine.calls.step_request import messages_of_step
from app.errors import NotFound
from app.gateway.runs import exchanges
from app.store.protocol import ContentReads, Journal, RunRow

F = TypeVar("F")


def summary(row: RunRow) -> dict[str, Any]:
    """Return a run as lists show it."""
    origin = None
    if row.origin_kind:
        origin = {"kind": row.origin_kind, "run": row.origin_run}
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
        "spent": _amount(row.spent),
        "held": _amount(row.held),
        "cap": _amount(row.cap),
        "error": row.error,
        "origin": origin,
    }


def _amount(amount: Amount) -> dict[str, Any]:
    return {"usd": dollars(amount.usd), "tokens": amount.tokens}


def render_run(
    row: RunRow, journal: Journal, feedback: Sequence[Feedback] = (), state: RunState | None = None
) -> dict[str, Any]:
    """Return a run with everything that is known of it but its content, and with its ratings. `state` is the fold of
    the journal where it is known already."""
    if state is None:
        state = fold(journal.events)
    run_facts, admitted = _facts_of(state, journal.events), state.admitted
    costs = bill(state)
    limits = asdict(admitted.limits)
    erasure, end = None, {}
    if not journal.salt:
        erasure = {"at": row.erased_at, "by": row.erased_by}
    if state.end is not None:
        end = state.end.to_json()
    return summary(row) | {
        "request_id": admitted.request_id or None,
        "trace_id": trace_of_turn(admitted.trace, state.turn.trace).id or None,
        "erased": not journal.salt,
        "erasure": erasure,
        "preview": admitted.preview,
        "seq": state.seq,
        "served_by": admitted.served_by or None,
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
        "rounds": state.round_count,
        "proposals": [_proposal(run_facts, proposal) for proposal in state.all_proposals],
        "steps": [_step(run_facts, n) for n in state.steps],
        "turns": exchanges.turns(state, journal.events),
        "usage": usage_of(costs),
        "total_usage": usage_figures(costs.total),
        "cost_usd": dollars(costs.usd),
        "end": end,
        "feedback": ratings(feedback),
    }


class _RunFacts(Struct, frozen=True):
    """A run's facts by what they are about, each read once from the journal."""

    state: RunState
    events: Sequence[Event]
    labels: Mapping[int, frozenset[str]]
    """The labels that each step has read."""
    proposals: Mapping[int, Proposal]
    calls: Mapping[int | None, Sequence[Call]]
    """The calls as the state has them: those for each step, and under None those for plans."""
    opened: Mapping[int, PlanOpened]
    planned: Mapping[int, PlanStep]
    intents: Mapping[int | None, Sequence[tuple[float, CallIntended]]]
    """The calls for each step, and under None those for plans."""
    finished: Mapping[str, CallFinished]
    failed: Mapping[int, StepFailed]
    done: Mapping[int, tuple[float, StepDone]]
    """The first end of each step that is done, with its time."""


def _facts_of(state: RunState, events: Sequence[Event]) -> _RunFacts:
    readings = LabelFlow(state).readings
    intents: dict[int | None, list[tuple[float, CallIntended]]] = {}
    for at, intent in facts_with_times(events, CallIntended):
        intents.setdefault(intent.n, []).append((at, intent))
    calls: dict[int | None, list[Call]] = {}
    for call in state.calls.values():
        calls.setdefault(call.step, []).append(call)
    return _RunFacts(
        state=state,
        events=events,
        labels={n: reading.labels for n, reading in readings.items()},
        proposals={proposal.number: proposal for proposal in state.all_proposals},
        calls=calls,
        opened=_keep_first((fact.proposal, fact) for fact in facts(events, PlanOpened)),
        planned=_keep_first((fact.n, fact) for fact in facts(events, PlanStep)),
        intents=intents,
        finished={fact.call: fact for fact in facts(events, CallFinished)},
        failed=_keep_first((fact.n, fact) for fact in facts(events, StepFailed)),
        done=_keep_first((fact.n, (at, fact)) for at, fact in facts_with_times(events, StepDone)),
    )


def _keep_first(pairs: Iterable[tuple[int, F]]) -> dict[int, F]:
    """Return the first value of each number."""
    values: dict[int, F] = {}
    for number, value in pairs:
        values.setdefault(number, value)
    return values


def _proposal(run_facts: _RunFacts, proposal: Proposal) -> dict[str, Any]:
    opening = run_facts.opened.get(proposal.number)
    decision, order = None, None
    if opening is not None:
        decision, order = opening.decision, list(opening.order)
    plan_steps = [fact for fact in run_facts.planned.values() if fact.proposal == proposal.number]
    calls: list[dict[str, Any]] = []
    embedding_calls: list[dict[str, Any]] = []
    for at, intent in run_facts.intents.get(None, ()):
        if proposal_of_call(intent) != proposal.number:
            continue
        if intent.template == EMBEDDING_TEMPLATE:
            embedding_calls.append(_attempt(at, intent, run_facts.finished))
        else:
            calls.append(_attempt(at, intent, run_facts.finished))
    return {
        "number": proposal.number,
        "mode": proposal.mode,
        "round": proposal.round,
        "parent": proposal.parent,
        "conductor": proposal.conductor,
        "state": proposal.state,
        "outage": proposal.outage,
        "reasons": list(proposal.reasons),
        "topology": proposal.topology or None,
        "decision": decision,
        "order": order,
        "steps": [fact.n for fact in plan_steps],
        "probabilities": {str(fact.n): fact.probability for fact in plan_steps},
        "attempts": calls,
        "embedding_attempts": embedding_calls,
    }


def _step(run_facts: _RunFacts, n: int) -> dict[str, Any]:
    state, step, calls = run_facts.state, run_facts.state.steps[n], run_facts.calls.get(n, ())
    plan_step, failure = run_facts.planned.get(n), run_facts.failed.get(n)
    proposal = run_facts.proposals[step.proposal]
    intents = run_facts.intents.get(n, ())
    planned_worker, probability, passed_over = step.worker, None, []
    if plan_step is not None:
        planned_worker, probability = plan_step.worker, plan_step.probability
    if failure is not None:
        passed_over = _list_passed_over(failure.passed_over)
    started_at, ended_at, kept_from = None, None, None
    if intents:
        started_at, _ = intents[0]
    if n in run_facts.done:
        ended_at, end = run_facts.done[n]
        kept_from = _describe_origin(end)
    return {
        "n": n,
        "proposal": step.proposal,
        "round": proposal.round,
        "parent": proposal.parent,
        "worker": step.worker,
        "planned_worker": planned_worker,
        "kept_from": kept_from,
        "probability": probability,
        "access": step.access.as_list(),
        "labels": sorted(run_facts.labels[n]),
        "declassified": sorted(step.output_lost),
        "tools": step.tools,
        "state": step.state,
        "error": step.error or None,
        "passed_over": passed_over,
        "chars": step.chars,
        "finish": step.finish or None,
        "started_at": started_at,
        "ended_at": ended_at,
        "usage": usage_figures(sum_usages(call.usage for call in calls)),
        "cost_usd": dollars(sum(call.usd for call in calls)),
        "seconds": sum(call.seconds for call in calls),
        "attempts": [_attempt(at, intent, run_facts.finished) for at, intent in intents],
        "exchanges": exchanges.exchanges(step, run_facts.events),
        "detail": f"/v1/runs/{state.run}/steps/{n}",
    }


def _describe_origin(end: StepDone) -> dict[str, Any] | None:
    """Return the step of an earlier run whose output this one has; None if a worker was called for it."""
    if not end.origin_run:
        return None
    return {"run": end.origin_run, "step": end.origin_step}


def _list_passed_over(workers: PassedOver) -> list[dict[str, str]]:
    return [{"worker": worker, "reason": reason} for worker, reason in workers]


def _attempt(at: float, intent: CallIntended, finished: Mapping[str, CallFinished]) -> dict[str, Any]:
    """Return an intent with its outcome, if it has one yet."""
    fields: dict[str, Any] = {
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
        "left_out": intent.left_out,
        "passed_over": _list_passed_over(intent.passed_over),
        "despite": intent.despite or None,
        "outcome": None,
    }
    if intent.call in finished:
        fields |= _outcome(finished[intent.call])
    return fields


def _outcome(finished: CallFinished) -> dict[str, Any]:
    blamed: str | None = finished.blamed
    if blamed == "silent":
        blamed = None
    return {
        "outcome": finished.outcome,
        "error": finished.error,
        "blamed": blamed,
        "retry_after": finished.retry_after,
        "reason": finished.reason or None,
        "http_status": finished.http_status,
        "provider_code": finished.provider_code or None,
        "provider_request_id": finished.request_id or None,
        "excerpt": finished.excerpt or None,
        "usage": usage_figures(finished.usage),
        "cost_usd": dollars(finished.usd),
        "seconds": finished.seconds,
        "first_delta_seconds": finished.first,
        "finish": finished.finish or None,
        "out_of_time": finished.out_of_time,
        "refused": finished.refused,
    }


async def step_in_full(store: ContentReads, state: RunState, events: Sequence[Event], n: int) -> dict[str, Any]:
    """Return a step with the exact messages that its worker saw, its subtask, its output, and what each attempt
    wrote."""
    step = state.steps[n]
    outputs = {fact.call: fact.output for fact in facts(events, CallFinished) if fact.n == n}
    refs = {step.subtask, step.output, *outputs.values(), *exchanges.refs(step)} - {""}
    texts = {"": ""}
    for ref, body in (await store.contents(state.run, sorted(refs))).items():
        texts[ref] = body.decode("utf-8", "replace")
    messages: list[dict[str, Any]] | None
    try:
        messages = [exchanges.message(message) for message in await messages_of_step(store, state, n)]
    except NotFound:
        messages = None
    fields = _step(_facts_of(state, events), n)
    for attempt in fields["attempts"]:
        attempt["output"] = texts.get(outputs.get(attempt["id"], ""))
    return fields | {
        "object": "run.step",
        "run": state.run,
        "erased": messages is None or not refs <= set(texts),
        "subtask": texts.get(step.subtask),
        "messages": messages,
        "exchanges": exchanges.exchanges_with_texts(step, events, texts),
        "output": texts.get(step.output),
    }


def rating(feedback: Feedback) -> dict[str, Any]:
    """Return a rating without its comment, which is content."""
    return {
        "id": feedback.id,
        "at": feedback.at,
        "kind": feedback.kind,
        "source": feedback.source,
        "version": feedback.version or None,
        "score": feedback.score,
        "label": feedback.label or None,
        "commented": bool(feedback.comment),
    }


def ratings(all_feedback: Sequence[Feedback]) -> dict[str, list[dict[str, Any]]]:
    """Return all ratings of a run by kind, oldest first: by callers, by graders, and from what callers did."""
    by_kind: dict[str, list[dict[str, Any]]] = {"explicit": [], "grader": [], "implicit": []}
    for feedback in all_feedback:
        by_kind[feedback.kind].append(rating(feedback))
    return by_kind
