"""`/v1/responses`: OpenAI's newer format over the same runs: create, retrieve, resume, cancel, delete, list inputs.

A background response is a run without a caller: it outlives its connection and this process, since any other driver
takes it over. `previous_response_id` goes on with a run that waits for tool results, or begins a new one whose
conversation is that of the response before and what came of it.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.core.message.chat import Tool
from app.core.run import position
from app.core.run.position import Position
from app.core.run.state import RunState
from app.engine.delivery import turn_result as endings
from app.engine.runs.request import Order
from app.errors import CallerError, Conflict, InvalidRequest, NotFound
from app.gateway.http.auth import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import Begun, OnceOnly, last_event
from app.gateway.http.ingress import read_json, read_json_if_any
from app.gateway.http.sse import EventStream, collect
from app.gateway.responses import items
from app.gateway.responses import reply as reply
from app.gateway.responses.history import Told, conversation, subject
from app.gateway.responses.references import resolved
from app.gateway.responses.request import ResponsesRequest, given, read_request, task_of
from app.gateway.responses.tools import found_by
from app.gateway.runs import cancel
from app.gateway.wire import query
from app.gateway.wire.baton_options import order_of, resolve_tier

GONE = "There is no response of that id, or this key may not see it."


def routes(context: GatewayContext, keys: Keys, once: OnceOnly) -> APIRouter:
    """Every route under /v1/responses."""
    router = APIRouter(prefix="/v1/responses")
    reader = Annotated[Caller, Depends(keys.needs("runs:read"))]
    writer = Annotated[Caller, Depends(keys.needs("runs:write"))]

    @router.post("", dependencies=[once.room])
    async def create(request: Request, caller: writer) -> Response:
        body = await read_json(request, context.bounds)
        asked, ignored = read_request(body)
        before = await _before(context, asked, caller)
        asked = await resolved(context.store, asked, lambda response: _told(context, response, caller))
        begun = await once.begin(
            request, caller, body, lambda: _order(context, asked, ignored, before, caller), at=_from_the_start
        )
        return await _begun(context, request, begun, asked)

    @router.get("/{response}")
    async def retrieve(response: str, request: Request, caller: reader) -> Response:
        known = query.read(request.query_params, STREAMING)
        told = await _told(context, response, caller)
        if not known.get("stream"):
            return _json(reply.whole(told.subject, told.ended))
        after = last_event(request)
        after = known.get("starting_after") if after is None else after
        _check(told.subject.state, after)
        state = told.subject.state
        begun = await once.hear(request, caller, state.run, None, turn=state.turn.number)
        return EventStream(context, begun.driven, reply.Events(told.subject, after), begun.permit, begun.seconds)

    @router.post("/{response}/cancel")
    async def stop(response: str, request: Request, caller: writer) -> Response:
        body = await read_json_if_any(request, context.bounds)

        async def stopped() -> Response:
            told = await _told(context, response, caller)
            row = await context.store.run(told.subject.state.run)
            await cancel.stop(context, row)
            return _json(await _present(context, response, caller))

        return await once.reply(request, caller, body, stopped)

    @router.delete("/{response}")
    async def delete(response: str, caller: writer) -> Response:
        told = await _told(context, response, caller)
        row = await context.store.run(told.subject.state.run)
        await cancel.stop(context, row)
        await context.store.erase(row.id)
        return _json(orjson.dumps({"id": response, "object": "response", "deleted": True}))

    @router.get("/{response}/input_items")
    async def inputs(response: str, request: Request, caller: reader) -> Response:
        told = await _told(context, response, caller)
        return _json(orjson.dumps(await items.page(context.store, told.subject, request.query_params)))

    return router


STREAMING: Mapping[str, query.Reader] = {
    "stream": query.truth,
    "starting_after": query.whole,
    **dict.fromkeys(("include", "include[]"), query.text),
    "include_obfuscation": query.text,
}


def _json(body: bytes) -> Response:
    return Response(body, media_type="application/json")


def _order(
    context: GatewayContext, asked: ResponsesRequest, ignored: tuple[str, ...], before: Told | None, caller: Caller
) -> Order:
    history = before.messages if before is not None else ()
    found = _found(before) if before is not None else []
    reasoning = asked.reasoning
    wire: dict[str, Any] = {"format": "responses", "given": len(given(asked)), "store": asked.store}
    wire |= {"instructions": True} if asked.instructions else {}
    wire |= {"background": True} if asked.background else {}
    wire |= {"previous": asked.previous_response_id} if asked.previous_response_id else {}
    wire |= {"effort": reasoning.effort, "summary": reasoning.summary} if reasoning is not None else {}
    order = order_of(
        task_of(asked, history, found),
        resolve_tier(context.catalog(), caller.key, asked.model),
        caller.key,
        model=asked.model,
        effort=reasoning.effort if reasoning is not None else None,
        extension=asked.baton,
        streams=asked.stream or asked.background,  # a background one may be streamed from any time on
        ignored=ignored,
        wire=wire,
    )
    return replace(order, on_disconnect="finish") if asked.background else order


def _found(before: Told) -> list[Tool]:
    """The tools that a response leaves on offer."""
    return found_by(before.subject.asked.toolbox, before.ended.calls if before.ended is not None else ())


async def _begun(context: GatewayContext, request: Request, begun: Begun, asked: ResponsesRequest) -> Response:
    of = await subject(context.store, begun.driven.state)
    if asked.stream:
        try:
            _check(begun.driven.state, begun.after)
        except CallerError:
            context.drivers.leave(begun.driven)
            begun.permit.release()
            raise
        return EventStream(context, begun.driven, reply.Events(of, begun.after), begun.permit, begun.seconds)
    if asked.background:
        context.drivers.leave(begun.driven)
        begun.permit.release()
        return _json(reply.whole(of, None))
    ended = await collect(context, begun, request.receive)
    return _json(reply.whole(await subject(context.store, ended.state), ended))


async def _told(context: GatewayContext, response: str, caller: Caller) -> Told:
    """A response of this caller's tenant that may be retrieved; `NotFound`."""
    parsed = reply.parse_id(response)
    if parsed is None:
        raise NotFound(GONE)
    run, turn = parsed
    try:
        row = await context.store.run(run)
        journal = await context.store.journal(run)
        state = endings.until_end(journal.events, turn)
        wire = state.turn.wire
        if caller.tenant not in (None, row.tenant) or wire.get("format") != "responses" or not wire.get("store"):
            raise NotFound(GONE)
        if turn > state.turn.number:
            raise NotFound(GONE)
        over = state.ended or state.state == "awaiting_tool"
        return Told(await subject(context.store, state), await endings.read(context.store, state) if over else None)
    except NotFound:
        raise NotFound(GONE) from None


async def _present(context: GatewayContext, response: str, caller: Caller) -> bytes:
    told = await _told(context, response, caller)
    return reply.whole(told.subject, told.ended)


async def _before(context: GatewayContext, asked: ResponsesRequest, caller: Caller) -> Told | None:
    """The response that this one follows, with the conversation that it leaves behind."""
    previous = asked.previous_response_id
    if previous is None:
        return None
    try:
        told = await _told(context, previous, caller)
    except NotFound:
        raise InvalidRequest(
            "There is no previous response of that id; send the whole conversation as input instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None
    if told.ended is None:
        raise Conflict(
            "The previous response is not complete yet; retrieve it until it is.", param="previous_response_id"
        )
    return replace(told, messages=await conversation(context.store, told))


def _from_the_start(_after: int) -> Position:
    """The events behind the text repeat all of it, so that whoever writes them must have heard it."""
    return Position()


def _check(state: RunState, after: int | None) -> None:
    """Whether a stream can go on behind that event."""
    if after is not None:
        at = position.read(after)
        chars = max(at.chars - reply.TEXT, 0)
        said = position.end_of(state).chars if state.replied else chars
        position.check(state, Position(at.attempt, min(chars, said)))
