"""A run as its auditor reads it, from the journal and nothing else: the row, the tree of steps, what each worker saw.

Ids, figures and reasons are metadata. Texts (what was asked, what was said) are content: they are looked up in the
content store, and where they were erased the field is null and `erased` says so.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from app.core.message.chat import summed, usage_from_json
from app.core.pool.catalog import MILLION
from app.core.rating.feedback import Feedback
from app.core.run.bill import bill
from app.core.run.events import Event, Kind
from app.core.run.progress import fold
from app.core.run.state import RunState
from app.engine.calls.step_request import see
from app.errors import NotFound
from app.gateway.chat.reply import dollars, figures, usage_of
from app.gateway.runs import exchanges, feedback
from app.store.protocol import Journal, Ledger, RunRow, Store


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
    }


def _ledger(ledger: Ledger) -> dict[str, Any]:
    return {"usd": dollars(ledger.usd), "tokens": ledger.tokens}


def whole(row: RunRow, journal: Journal, given: Sequence[Feedback] = ()) -> dict[str, Any]:
    """A run with everything that is known of it but its content, and the ratings that it was given."""
    state = fold(journal.events)
    admitted = dict(journal.events[0].body)
    split = bill(state)
    limits = admitted.get("limits", {})
    return summary(row) | {
        "erased": not journal.salt,
        "seq": state.seq,
        "effort": admitted.get("effort"),
        "limits": {**limits, "usd": limits.get("usd", 0) / MILLION},
        "labels": admitted.get("labels", []),
        "overrides": admitted.get("overrides"),
        "pool": admitted.get("pool", []),
        "excluded": admitted.get("excluded", {}),
        "catalog": admitted.get("catalog", ""),
        "ignored": admitted.get("ignored", []),
        "conductor": admitted.get("conductor"),
        "cancel_asked": state.cancel_asked,
        "rounds": state.rounds,
        "proposals": _proposals(state, journal.events),
        "steps": [_step(state, n, journal.events) for n in state.steps],
        "turns": exchanges.turns(state, journal.events),
        "usage": usage_of(split),
        "total_usage": figures(split.total),
        "cost_usd": dollars(split.usd),
        "end": dict(state.end),
        "feedback": feedback.listed(given),
    }


def _of(events: Sequence[Event], kind: Kind, **fields: object) -> list[Event]:
    """The events of a kind whose bodies hold these values."""
    return [
        event
        for event in events
        if event.kind is kind and all(event.body.get(name) == value for name, value in fields.items())
    ]


def _proposals(state: RunState, events: Sequence[Event]) -> list[dict[str, Any]]:
    shown = []
    for one in state.all_proposals:
        opened = _of(events, Kind.PLAN_OPENED, proposal=one.number)
        planned = _of(events, Kind.PLAN_STEP, proposal=one.number)
        calls = [_attempt(event, events) for event in _of(events, Kind.CALL_INTENDED, n=None, attempt=one.number + 1)]
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
                "decision": opened[0].body.get("decision") if opened else None,
                "order": opened[0].body.get("order") if opened else None,
                "steps": [event.body["n"] for event in planned],
                "probabilities": {str(event.body["n"]): event.body.get("probability") for event in planned},
                "attempts": [call for call in calls if call["id"] == one.call] or calls,
            }
        )
    return shown


def _step(state: RunState, n: int, events: Sequence[Event]) -> dict[str, Any]:
    step = state.steps[n]
    calls = [call for call in state.calls.values() if call.step == n]
    planned = _of(events, Kind.PLAN_STEP, n=n)
    proposal = next(one for one in state.all_proposals if one.number == step.proposal)
    done, failed = _of(events, Kind.STEP_DONE, n=n), _of(events, Kind.STEP_FAILED, n=n)
    return {
        "n": n,
        "proposal": step.proposal,
        "round": proposal.round,
        "parent": proposal.parent,
        "worker": step.worker,
        "planned_worker": planned[0].body["worker"] if planned else step.worker,
        "probability": planned[0].body.get("probability") if planned else None,
        "access": step.access.as_list(),
        "tools": step.tools,
        "state": step.state,
        "error": step.error or None,
        "passed_over": failed[0].body.get("passed_over", []) if failed else [],
        "chars": step.chars,
        "finish": step.finish or None,
        "started_at": _first_at(_of(events, Kind.CALL_INTENDED, n=n)),
        "ended_at": _first_at(done),
        "usage": figures(summed(call.usage for call in calls)),
        "cost_usd": dollars(sum(call.usd for call in calls)),
        "seconds": sum(call.seconds for call in calls),
        "attempts": [_attempt(event, events) for event in _of(events, Kind.CALL_INTENDED, n=n)],
        "exchanges": exchanges.exchanges(step, events),
        "detail": f"/v1/runs/{state.run}/steps/{n}",
    }


def _first_at(events: Sequence[Event]) -> float | None:
    return events[0].at if events else None


def _attempt(intent: Event, events: Sequence[Event]) -> dict[str, Any]:
    """An intent with its outcome, if it has one yet."""
    body = intent.body
    shown: dict[str, Any] = {
        "id": body["call"],
        "attempt": body.get("attempt"),
        "worker": body["worker"],
        "provider": body.get("provider"),
        "model": body.get("model"),
        "version": body.get("version"),
        "at": intent.at,
        "access": body["access"],
        "request": body.get("request"),
        "held": {"usd": dollars(body["usd_held"]), "tokens": body["tokens_held"]},
        "passed_over": body.get("passed_over", []),
        "despite": body.get("despite"),
        "outcome": None,
    }
    for event in _of(events, Kind.CALL_FINISHED, call=body["call"]):
        shown |= _outcome(event.body)
    return shown


def _outcome(body: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "outcome": body["outcome"],
        "error": body.get("error"),
        "blamed": body.get("blamed"),
        "retry_after": body.get("retry_after"),
        "usage": figures(usage_from_json(body["usage"])),
        "cost_usd": dollars(body["usd"]),
        "seconds": body["seconds"],
        "first_delta_seconds": body.get("first"),
        "finish": body.get("finish") or None,
        "refused": body.get("refused", False),
    }


async def step_in_full(store: Store, state: RunState, events: Sequence[Event], n: int) -> dict[str, Any]:
    """A step with the exact messages that its worker saw, its subtask, its output, and what each attempt said."""
    step = state.steps[n]
    outputs = {event.body["call"]: event.body.get("output", "") for event in _of(events, Kind.CALL_FINISHED, n=n)}
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
