"""Turns and tool calls of a run as its auditor reads them; the rest of the audit trail is in `audit.py`.

A run that waits for tool results has one turn for each request that its caller made. Whose tool was called, and when,
is metadata; what it was called with and what came back is content.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import orjson

from app.core.message.chat import Document, Message, Part, Text, Usage, message_from_json
from app.core.run.caller_view import bill, dollars, usage_figures
from app.core.run.events import (
    Event,
    RunAdmitted,
    RunAwaitingTool,
    RunEnd,
    RunResumed,
    StepAwaitingTool,
    StepToolResults,
    facts_with_times,
)
from app.core.run.identifiers import reply_id
from app.core.run.state import RunState, StepState
from app.gateway.chat.request import wire_calls


def turns(state: RunState, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return one record for each of the caller's requests, with what that turn used."""
    turn_records = [_turn(state.run, 0, events[0].at, state.admitted)]
    for event in events:
        fact = event.fact
        if isinstance(fact, RunAwaitingTool):
            turn_records[-1] |= _usage_of(event.at, fact.usage, fact.usd)
            turn_records[-1] |= {"finish": "tool_calls", "results_until": fact.until}
        elif isinstance(fact, RunResumed):
            turn_records.append(_turn(state.run, fact.turn, event.at, fact))
        elif isinstance(fact, RunEnd) and turn_records[-1]["ended_at"] is None:
            turn_records[-1] |= {"ended_at": event.at, "finish": fact.finish}
    if turn_records[-1]["results_until"] is None:
        costs = bill(state)
        turn_records[-1] |= _usage_of(turn_records[-1]["ended_at"], costs.turn, costs.turn_usd)
    return turn_records


def _turn(run: str, number: int, at: float, fact: RunAdmitted | RunResumed) -> dict[str, Any]:
    return {
        "number": number,
        "request_id": fact.request_id or None,
        "reply_id": reply_id(fact.wire, run, number),
        "at": at,
        "deadline": fact.deadline,
        "stream": fact.streams,
        "ended_at": None,
        "finish": None,
        "results_until": None,
    }


def _usage_of(at: float | None, usage: Usage, usd: int) -> dict[str, Any]:
    return {"ended_at": at, "usage": usage_figures(usage), "cost_usd": dollars(usd)}


def exchanges(step: StepState, events: Sequence[Event]) -> list[dict[str, Any]]:
    """Return each use of tools by a step, with its calls and the times of the calls and of their results."""
    if not step.exchanges:
        return []
    requests = [(at, fact) for at, fact in facts_with_times(events, StepAwaitingTool) if fact.n == step.n]
    result_times = [at for at, fact in facts_with_times(events, StepToolResults) if fact.n == step.n]
    uses: list[dict[str, Any]] = []
    for place, (exchange, (at, fact)) in enumerate(zip(step.exchanges, requests, strict=True)):
        answered_at = None
        if place < len(result_times):
            answered_at = result_times[place]
        uses.append(
            {
                "turn": exchange.turn,
                "attempt": exchange.call,
                "worker": exchange.worker,
                "at": at,
                "calls": [{"id": call.id, "name": call.name} for call in fact.calls],
                "answered_at": answered_at,
            }
        )
    return uses


def without_ids(run: dict[str, Any], waiting: Collection[str]) -> dict[str, Any]:
    """Return the record of a run without the ids of the calls that wait: whoever sends results under them goes on with
    the run and receives its answer."""
    for step in run["steps"]:
        for use in step["exchanges"]:
            use["calls"] = _without_ids(use["calls"], waiting)
    return run


def event_without_ids(body: Mapping[str, Any], waiting: Collection[str]) -> Mapping[str, Any]:
    """Return the body of a `step.awaiting_tool` without these ids."""
    return {**body, "calls": _without_ids(body["calls"], waiting)}


def _without_ids(calls: Sequence[Mapping[str, Any]], waiting: Collection[str]) -> list[dict[str, Any]]:
    calls_without_ids: list[dict[str, Any]] = []
    for call in calls:
        call_id = call["id"]
        if call_id in waiting:
            call_id = None
        calls_without_ids.append({**call, "id": call_id})
    return calls_without_ids


def refs(step: StepState) -> set[str]:
    """Return the refs of the content that `exchanges_with_texts` shows."""
    refs_in_step: set[str] = set()
    for exchange in step.exchanges:
        refs_in_step |= {exchange.message, exchange.results}
    return refs_in_step - {""}


def exchanges_with_texts(step: StepState, events: Sequence[Event], texts: Mapping[str, str]) -> list[dict[str, Any]]:
    """`exchanges` with the texts of calls and results; null where one was erased or has not arrived yet."""
    uses = exchanges(step, events)
    for record, exchange in zip(uses, step.exchanges, strict=True):
        record |= {"said": None, "results": None}
        if exchange.message in texts:
            record["said"] = message(message_from_json(orjson.loads(texts[exchange.message])))
        if exchange.results and exchange.results in texts:
            results = orjson.loads(texts[exchange.results])
            record["results"] = [message(message_from_json(result)) for result in results]
    return uses


def message(message: Message) -> dict[str, Any]:
    """Return a message as OpenAI writes it, with what its provider wants back with it."""
    fields: dict[str, Any] = {"role": message.role, "content": [_part(part) for part in message.parts]}
    if message.calls:
        fields["tool_calls"] = wire_calls(message.calls)
    if message.call_id:
        fields |= {"tool_call_id": message.call_id, "failed": message.failed}
    if message.keepsake:
        fields["keepsake"] = message.keepsake
    if message.name:
        fields["name"] = message.name
    return fields


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Document):
        return {"type": "file", "file": {"filename": part.name, "file_data": part.url}}
    return {"type": "image_url", "image_url": {"url": part.url, "detail": part.detail}}
