"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's format over the same runs as every other.

Everything that `chat/route.py` promises holds here; errors of these routes have Anthropic's shape (`reply.py`).
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

from fastapi import APIRouter
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from app.core.message.chat import labels_of
from app.core.pool.policy import estimate_input
from app.engine.runs.admission import Order
from app.gateway.anthropic import reply
from app.gateway.anthropic.request import (
    MessagesRequest,
    TokenCountRequest,
    build_task,
    effort_of,
    read_count,
    read_request,
    stop_sequences,
    task_of,
)
from app.gateway.anthropic.tools import long_names
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import Bounds, GatewayContext
from app.gateway.http.direct import Direct
from app.gateway.http.idempotency import Idempotency, OpenTurn
from app.gateway.http.json_reply import json_reply
from app.gateway.http.sse import EventStream, collect
from app.gateway.openapi import message_replies, operations
from app.gateway.wire.parameters import RequestOptions, order_of, resolve_tier

PREFIX: Final = "/v1/messages"
"""The beginning of the paths whose errors have Anthropic's shape, and whose replies name their id as Anthropic does."""
SCHEMAS: Final[operations.Schemas] = {
    "MessagesRequest": lambda: operations.request_schema(MessagesRequest, "MessagesRequest"),
    "TokenCountRequest": lambda: operations.request_schema(TokenCountRequest, "TokenCountRequest"),
    "MessageEvent": lambda: operations.event_schema(message_replies.MessageEvent),
}
EXAMPLE: Final = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return the routes of the messages wire format."""
    router = APIRouter(prefix=PREFIX, tags=["messages"])
    bounds = replace(context.bounds, large_numbers=True)
    _add_create_route(router, context, keys, idempotency, bounds)

    @router.post(
        "/count_tokens",
        operation_id="count_message_tokens",
        summary="Estimate the tokens of a conversation (Anthropic's format).",
        response_model=message_replies.TokenCount,
        responses=operations.replies(*operations.WRITING, bodies=(message_replies.AnthropicError,)),
        openapi_extra=operations.body("TokenCountRequest", example=EXAMPLE),
    )
    async def count_message_tokens(
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(bounds)],
        request: Request,
    ) -> Response:
        """The tokens of the input, with its tools; nothing is sent to a worker."""

        async def count() -> Response:
            message_request = read_count(body)
            resolve_tier(context.catalog(), caller.key, message_request.model)
            task = task_of(message_request)
            return json_reply({"input_tokens": estimate_input(task)})

        return await idempotency.reply(request, caller, body, count)

    return router


def _add_create_route(
    router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency, bounds: Bounds
) -> None:
    async def create_message(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(bounds)],
    ) -> Response:
        """Anthropic's message, whole or, with `stream: true`, as server-sent events."""

        async def order() -> Order:
            return to_order(context, caller, body)

        turn = await idempotency.begin(request, caller, body, order)
        streams = body.get("stream") is True
        return await reply_to_turn(context, request, turn, stop_sequences(body), streams=streams)

    router.add_api_route(
        "",
        create_message,
        methods=["POST"],
        route_class_override=Direct,
        operation_id="create_message",
        summary="Answer a conversation (Anthropic's format).",
        dependencies=[idempotency.capacity],
        response_model=message_replies.AnthropicMessage,
        responses=operations.replies(
            *operations.RUNNING,
            bodies=(message_replies.AnthropicError,),
            events="MessageEvent",
        ),
        openapi_extra=operations.body("MessagesRequest", example={**EXAMPLE, "max_tokens": 1024}),
    )


def to_order(context: GatewayContext, caller: Caller, body: Mapping[str, object]) -> Order:
    """Return the order of a run for a request. Raises `InvalidRequest` and `NotFound`."""
    message_request, ignored = read_request(body)
    task = build_task(message_request)
    tier = resolve_tier(context.catalog(), caller.key, message_request.model)
    wire: dict[str, Any] = {"format": "messages"}
    names = long_names(message_request.tools)
    if names:
        wire["names"] = names
    options = RequestOptions(
        model=message_request.model,
        wire=wire,
        effort=effort_of(message_request),
        extension=message_request.baton,
        streams=message_request.stream,
        ignored=ignored,
        on_messages=labels_of(task.messages),
    )
    return order_of(task, tier, caller.key, options)


async def reply_to_turn(
    context: GatewayContext, request: Request, turn: OpenTurn, stops: Sequence[str], *, streams: bool
) -> Response:
    """Return the reply of a run, whole or as a stream; `stops` are the stop sequences of its request."""
    if streams:
        request_id = request.scope["baton.headers"][0][1].decode()
        events = reply.Events(turn.run.state, request_id, turn.after, stops)
        return EventStream(context, turn, events)
    end = await collect(context, turn, request.receive)
    return Response(reply.message(end, stops), media_type="application/json")
