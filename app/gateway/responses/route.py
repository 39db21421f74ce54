"""`/v1/responses`: OpenAI's newer format over the same runs: create, retrieve, resume, cancel, delete, list inputs.

A background response is a run without a caller: it outlives its connection and this process, since any other driver
takes it over. `previous_response_id` goes on with a run that waits for tool results, or begins a new one whose
conversation is that of the response before and what came of it.
"""

from typing import Annotated, Any, Final

from fastapi import APIRouter, Path, Query
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from app.core.message.chat import Task, labels_of
from app.core.pool.policy import estimate_input
from app.core.run import caller_view
from app.core.run.caller_view import Position
from app.core.run.state import RunState
from app.engine.delivery import messages as turn_ends
from app.engine.delivery.messages import TurnEnd
from app.engine.runs.admission import Order
from app.errors import Conflict, InvalidRequest, NotFound
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.direct import Direct
from app.gateway.http.fault import AWAITING_APPROVAL
from app.gateway.http.idempotency import Idempotency, OpenTurn, TurnToFollow, last_event
from app.gateway.http.json_reply import json_reply
from app.gateway.http.sse import EventStream, collect
from app.gateway.openapi import operations, response_replies
from app.gateway.responses import compaction, items, reply
from app.gateway.responses.history import StoredResponse, conversation, subject
from app.gateway.responses.references import resolve_references
from app.gateway.responses.request import (
    CountRequest,
    ResponsesRequest,
    new_messages,
    read_request,
    task_of,
    validate_body,
)
from app.gateway.responses.tools import tools_loaded_after
from app.gateway.runs import cancel, reads
from app.gateway.wire import query
from app.gateway.wire.parameters import COMPACTION, INPUT_TOKENS, RESPONSES, RequestOptions, order_of, resolve_tier
from app.gateway.wire.request_schemas import build_schema
from app.store.protocol import RunRow

NOT_FOUND_MESSAGE = "There is no response of that id, or this key may not see it."
NOT_BACKGROUND_MESSAGE = (
    "Cannot cancel a synchronous response: it was not created with background: true. "
    "POST /v1/runs/{id}/cancel stops the run of any response."
)


SCHEMAS: Final[operations.Schemas] = {
    "ResponsesRequest": lambda: build_schema(ResponsesRequest, "ResponsesRequest", RESPONSES, ("model", "input")),
    "CompactionRequest": lambda: build_schema(
        compaction.CompactionRequest, "CompactionRequest", COMPACTION, ("model",)
    ),
    "InputTokensRequest": lambda: build_schema(CountRequest, "InputTokensRequest", INPUT_TOKENS, ()),
    "ResponseEvent": lambda: operations.event_schema(response_replies.ResponseEvent),
}
ResponseId = Annotated[str, Path(alias="response", description="The response's id.", examples=["resp_run_01jd9k2v7c"])]


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return every route under /v1/responses."""
    router = APIRouter(prefix="/v1/responses", tags=["responses"])
    _add_create_route(router, context, keys, idempotency)
    _add_compact_route(router, context, keys, idempotency)
    _add_count_route(router, context, keys, idempotency)
    _add_read_routes(router, context, keys, idempotency)
    _add_cancel_route(router, context, keys, idempotency)
    _add_delete_route(router, context, keys)
    return router


def _add_create_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    async def create_response(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
    ) -> Response:
        """OpenAI's response: whole, in the background, or, with `stream: true`, as server-sent events."""
        response_request, ignored = read_request(body, omits_search=context.omits_search)

        async def order() -> Order:
            return await _order(context, caller, response_request, ignored)

        turn = await idempotency.begin(request, caller, body, order, needs_whole_text=True)
        streams, background = response_request.stream, response_request.background
        return await reply_to_turn(context, request, turn, streams=streams, background=background)

    router.add_api_route(
        "",
        create_response,
        methods=["POST"],
        route_class_override=Direct,
        operation_id="create_response",
        summary="Answer input.",
        dependencies=[idempotency.capacity],
        response_model=response_replies.ResponseObject,
        responses=operations.replies(*operations.RUNNING, events="ResponseEvent"),
        openapi_extra=operations.body(
            "ResponsesRequest",
            example={"model": "baton-mini", "input": "What is 2 + 2?"},
        ),
    )


def _add_compact_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    async def compact_response(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
    ) -> Response:
        """Return the messages of the user, and one item with notes of everything else: the next request's `input`."""
        response_request, ignored = compaction.read_request(body)

        async def order() -> Order:
            before = await _find_previous_response(context, response_request, caller)
            resolved_request = await _resolve_references(context, response_request, caller)
            history = before.messages if before is not None else ()
            task = compaction.task_of(resolved_request, history)
            if before is not None:
                task = compaction.for_user_of(before.subject.task, task)
            tier = resolve_tier(context.catalog(), caller.key, response_request.model)
            options = RequestOptions(
                model=response_request.model,
                wire={"format": compaction.FORMAT},
                extension=response_request.baton,
                ignored=ignored,
                on_messages=_labels_on_messages(task, before),
            )
            return order_of(task, tier, caller.key, options)

        turn = await idempotency.begin(request, caller, body, order)
        end = await collect(context, turn, request.receive)
        compaction.require_notes(end)
        return json_reply(compaction.compaction_reply(await subject(context.store, end.state), end))

    router.add_api_route(
        "/compact",
        compact_response,
        methods=["POST"],
        route_class_override=Direct,
        operation_id="compact_response",
        summary="Make a conversation shorter.",
        dependencies=[idempotency.capacity],
        response_model=response_replies.CompactedResponse,
        responses=operations.replies(*operations.RUNNING),
        openapi_extra=operations.body("CompactionRequest", example={"model": "baton-mini", "input": "What is 2 + 2?"}),
    )


def _add_count_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    @router.post(
        "/input_tokens",
        operation_id="count_response_input_tokens",
        summary="Estimate the tokens of input.",
        response_model=response_replies.InputTokens,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("InputTokensRequest", example={"model": "baton-mini", "input": "What is 2 + 2?"}),
    )
    async def count_response_input_tokens(
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
        request: Request,
    ) -> Response:
        """The tokens of the conversation, with its tools; nothing is sent to a worker."""

        async def count() -> Response:
            response_request, _ = validate_body(body, INPUT_TOKENS, CountRequest, omits_search=context.omits_search)
            if response_request.model:
                resolve_tier(context.catalog(), caller.key, response_request.model)
            before = await _find_previous_response(context, response_request, caller)
            resolved_request = await _resolve_references(context, response_request, caller)
            task = _task(resolved_request, before)
            return json_reply({"object": "response.input_tokens", "input_tokens": estimate_input(task)})

        return await idempotency.reply(request, caller, body, count)


def _add_read_routes(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    reader = Annotated[Caller, keys.needs("runs:read")]

    @router.get(
        "/{response}",
        operation_id="get_response",
        summary="Retrieve a response, or stream it from behind an event.",
        response_model=response_replies.ResponseObject,
        responses=operations.replies(*operations.FOLLOWING, events="ResponseEvent"),
        openapi_extra={"parameters": [operations.LAST_EVENT_ID]},
    )
    async def get_response(
        response: ResponseId, options: Annotated[query.ResponseOptions, Query()], caller: reader, request: Request
    ) -> Response:
        """Return the response as it stands, or stream it again. `Last-Event-ID` counts before `starting_after`."""
        stored_response = await _find_stored(context, response, caller)
        if not options.stream:
            return json_reply(reply.render_response(stored_response.subject, stored_response.end))
        after = last_event(request, options.starting_after)
        _check(stored_response.subject.state, after)
        state = stored_response.subject.state
        if request.method == "HEAD":  # which would wait for the response's end, and for no body
            return Response(media_type="text/event-stream")
        turn = await idempotency.follow(request, caller, TurnToFollow(state.run, number=state.turn.number))
        return EventStream(context, turn, reply.Events(stored_response.subject, after))

    @router.get(
        "/{response}/input_items",
        operation_id="list_response_input_items",
        summary="List the items of the input of a response's request.",
        response_model=response_replies.InputItemList,
        responses=operations.replies(*operations.READING),
    )
    async def list_response_input_items(
        response: ResponseId, filters: Annotated[query.ItemFilters, Query()], caller: reader
    ) -> Response:
        """Newest first, unless `order=asc`."""
        stored_response = await _find_stored(context, response, caller)
        store = context.store.of_tenant(caller.tenant)
        return json_reply(await items.page(store, stored_response.subject, filters))


def _add_cancel_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    @router.post(
        "/{response}/cancel",
        operation_id="cancel_response",
        summary="Cancel a response.",
        response_model=response_replies.ResponseObject,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("CancelRequest", required=False),
    )
    async def cancel_response(
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds, optional=True)],
        response: ResponseId,
        request: Request,
    ) -> Response:
        """Cancel its run and wait a little for the end. A response that is over stays as it is, and so does its run.

        Only a response that was created with `background: true` can be cancelled, as with OpenAI.
        """

        async def stop() -> Response:
            stored_response = await _find_stored(context, response, caller)
            if not stored_response.subject.state.turn.wire.get("background"):
                raise InvalidRequest(NOT_BACKGROUND_MESSAGE)
            if reply.status_of(stored_response.subject, stored_response.end) in ("queued", "in_progress"):
                store = context.store.of_tenant(caller.tenant)
                row = await store.run(stored_response.subject.state.run)
                await cancel.stop(store, context.queue, row, context.now())
                stored_response = await _find_stored(context, response, caller)
            return json_reply(reply.render_response(stored_response.subject, stored_response.end))

        return await idempotency.reply(request, caller, body, stop, keeps_reply=False)


def _add_delete_route(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    @router.delete(
        "/{response}",
        operation_id="delete_response",
        summary="Delete a response and its content.",
        response_model=response_replies.DeletedResponse,
        responses=operations.replies(*operations.READING, 409),
    )
    async def delete_response(response: ResponseId, caller: Annotated[Caller, keys.needs("runs:write")]) -> Response:
        """Its run is cancelled if it goes on; the journal keeps what is no content. A legal hold forbids it (409)."""
        # Whoever may erase a run may delete its response, so the key need not have begun it.
        stored_response, _ = await _of_tenant(context, response, caller)
        store = context.store.of_tenant(caller.tenant)
        row = await store.run(stored_response.subject.state.run)
        await cancel.stop_with_copies(store, context.queue, row, context.now())
        if not await store.erase(row.id, by=caller.actor):  # it was pruned just now
            raise NotFound(NOT_FOUND_MESSAGE)
        return json_reply({"id": response, "object": "response", "deleted": True})


async def _order(
    context: GatewayContext, caller: Caller, response_request: ResponsesRequest, ignored: tuple[str, ...]
) -> Order:
    before = await _find_previous_response(context, response_request, caller)
    response_request = await _resolve_references(context, response_request, caller)
    reasoning = response_request.reasoning
    wire: dict[str, Any] = {
        "format": "responses",
        "given": len(new_messages(response_request)),
        "store": response_request.store,
    }
    if response_request.instructions:
        wire["instructions"] = True
    if response_request.background:
        wire["background"] = True
    if response_request.previous_response_id:
        wire["previous"] = response_request.previous_response_id
    if reasoning is not None:
        wire |= {"effort": reasoning.effort, "summary": reasoning.summary}
    task = _task(response_request, before)
    asked = task.messages[1:] if response_request.instructions else task.messages
    if not any(message.parts or message.calls for message in asked):
        raise InvalidRequest("Invalid value for 'input': at least one of its items must have content.", param="input")
    tier = resolve_tier(context.catalog(), caller.key, response_request.model)
    options = RequestOptions(
        model=response_request.model,
        effort=reasoning.effort if reasoning is not None else None,
        extension=response_request.baton,
        streams=response_request.stream or response_request.background,  # which may be streamed at any time
        ignored=ignored,
        wire=wire,
        on_messages=_labels_on_messages(task, before),
    )
    order = order_of(task, tier, caller.key, options)
    if response_request.background:
        return replace(order, on_disconnect="finish", followed=response_request.stream)
    return order


def _task(response_request: ResponsesRequest, before: StoredResponse | None) -> Task:
    """Return the task of a request, with the conversation and the tools on offer that the response before leaves."""
    if before is None:
        return task_of(response_request, ())
    calls = before.end.calls if before.end is not None else ()
    return task_of(response_request, before.messages, tools_loaded_after(before.subject.turn_task.toolbox, calls))


def _labels_on_messages(task: Task, before: StoredResponse | None) -> frozenset[str]:
    """Return the labels of a request's conversation, and those of the response that it follows."""
    labels = labels_of(task.messages)
    if before is None:
        return labels
    return labels | before.labels


async def to_order(context: GatewayContext, caller: Caller, body: dict[str, Any]) -> Order:
    """Return the order of a run for a request. Raises `InvalidRequest` and `NotFound`."""
    response_request, ignored = read_request(body, omits_search=context.omits_search)
    return await _order(context, caller, response_request, ignored)


async def reply_to_turn(
    context: GatewayContext, request: Request, turn: OpenTurn, *, streams: bool, background: bool
) -> Response:
    """Return the reply of a run: as a stream, in the background, or whole."""
    if not streams and not background:
        end = await collect(context, turn, request.receive)
        return json_reply(reply.render_response(await subject(context.store, end.state), end))
    state = turn.run.state
    end_by_now: TurnEnd | None = None
    try:
        source = await subject(context.store, state)
        if streams:
            _check(state, turn.after)
        elif state.replied:  # the request was sent again
            end_by_now = await turn_ends.read_turn_end(context.store, state)
    except BaseException:
        _stop_following(context, turn)
        raise
    if streams:
        return EventStream(context, turn, reply.Events(source, turn.after))
    _stop_following(context, turn)
    return json_reply(reply.render_response(source, end_by_now))


def _stop_following(context: GatewayContext, turn: OpenTurn) -> None:
    context.runs.leave(turn.run)
    turn.permit.release()


async def _resolve_references(
    context: GatewayContext, response_request: ResponsesRequest, caller: Caller
) -> ResponsesRequest:
    """Return the request with each reference to an item replaced by what it names."""
    store = context.store.of_tenant(caller.tenant)
    return await resolve_references(store, response_request, lambda response: _find_own(context, response, caller))


async def _find_stored(context: GatewayContext, response: str, caller: Caller) -> StoredResponse:
    """Return a response that this caller may read: one that its key began, or with `audit:read` any of its tenant's.
    `NotFound`."""
    stored_response, row = await _of_tenant(context, response, caller)
    if not caller.may_read_content(row.key):
        raise NotFound(NOT_FOUND_MESSAGE)
    await reads.note_foreign(context, caller, row, "response")
    return stored_response


async def _find_own(context: GatewayContext, response: str, caller: Caller) -> StoredResponse:
    """Return a response of the key's own tenant, as `_find_stored` does. What goes on with it is a run of that tenant,
    so a key of all tenants takes no conversation of another one there."""
    return await _find_stored(context, response, replace(caller, key=replace(caller.key, all_tenants=False)))


async def _of_tenant(context: GatewayContext, response: str, caller: Caller) -> tuple[StoredResponse, RunRow]:
    """Return a response of this caller's tenant that may be retrieved, and the row of its run; `NotFound`."""
    reply_id = reply.parse_id(response)
    if reply_id is None:
        raise NotFound(NOT_FOUND_MESSAGE)
    run, turn = reply_id
    try:
        store = context.store.of_tenant(caller.tenant)
        row = await store.run(run)
        journal = await store.journal(run)
        state = turn_ends.fold_until_reply(journal.events, turn)
        wire = state.turn.wire
        if not caller.sees(row.tenant) or wire.get("format") != "responses" or not wire.get("store"):
            raise NotFound(NOT_FOUND_MESSAGE)
        if turn > state.turn.number:
            raise NotFound(NOT_FOUND_MESSAGE)
        end = await turn_ends.read_turn_end(store, state) if state.replied else None
        return StoredResponse(await subject(store, state), end), row
    except NotFound:
        raise NotFound(NOT_FOUND_MESSAGE) from None


async def _find_previous_response(
    context: GatewayContext, response_request: ResponsesRequest, caller: Caller
) -> StoredResponse | None:
    """Return the response that this one follows, with the conversation that it leaves behind."""
    previous = response_request.previous_response_id
    if previous is None:
        return None
    try:
        earlier = await _find_own(context, previous, caller)
    except NotFound:
        raise InvalidRequest(
            "There is no previous response of that id; send the whole conversation as input instead.",
            param="previous_response_id",
            code="previous_response_not_found",
        ) from None
    if earlier.end is None or earlier.end.state.state == AWAITING_APPROVAL:
        raise Conflict(
            "The previous response is not complete yet; retrieve it until it is.", param="previous_response_id"
        )
    store = context.store.of_tenant(caller.tenant)
    return replace(earlier, messages=await conversation(store, earlier))


def _check(state: RunState, after: int | None) -> None:
    """Raise `InvalidRequest` if a stream cannot go on behind that event."""
    if after is None:
        return
    position = caller_view.read_position(after)
    chars = max(position.chars - reply.TEXT, 0)
    if state.replied:
        chars = min(chars, caller_view.end_position(state).chars)
    attempt = caller_view.count_earlier_attempts(state) + position.attempt
    caller_view.check_position(state, Position(attempt, chars))
