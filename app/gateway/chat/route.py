"""`POST /v1/chat/completions`: key, body, admission, run, reply, in this order.

Nothing costs money before the last check.
"""

from typing import Annotated, Final

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.engine.runs.admission import Order
from app.gateway.chat.reply import Chunks, completion
from app.gateway.chat.request import ChatRequest, read_request, to_order
from app.gateway.http.admission import Begun, Idempotency
from app.gateway.http.api_keys import Caller
from app.gateway.http.auth import Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.ingress import Direct, json_body
from app.gateway.http.sse import EventStream, collect
from app.gateway.openapi import chat_replies, operations, replies
from app.gateway.wire.baton_options import resolve_tier
from app.gateway.wire.parameters import PARAMETERS
from app.gateway.wire.request_schemas import tabled

TERMINAL: Final = "[DONE]"
"""The data of the last event of a stream that did not end with an error."""
SCHEMAS: Final[operations.Schemas] = {
    "ChatRequest": lambda: tabled(ChatRequest, "ChatRequest", PARAMETERS, ("model", "messages")),
    "ChatCompletionEvent": lambda: operations.event_schema(chat_replies.ChatCompletionChunk | replies.Error),
}
EXAMPLE: Final = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """The route of the chat wire format."""
    router = APIRouter(route_class=Direct, tags=["chat"])

    @router.post(
        "/v1/chat/completions",
        operation_id="create_chat_completion",
        summary="Answer a conversation.",
        dependencies=[idempotency.capacity],
        response_model=chat_replies.ChatCompletion,
        responses=operations.replies(*operations.RUNNING, events="ChatCompletionEvent", terminal=TERMINAL),
        openapi_extra=operations.body("ChatRequest", example=EXAMPLE),
    )
    async def create_chat_completion(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
    ) -> Response:
        """OpenAI's chat completion, whole or, with `stream: true`, as server-sent events."""

        def order() -> Order:
            asked, ignored = read_request(body)
            return to_order(asked, ignored, resolve_tier(context.catalog(), caller.key, asked.model), caller.key)

        begun = await idempotency.begin(request, caller, body, order)
        if begun.driven.state.turn.streams:
            return stream(context, begun)
        return Response(completion(await collect(context, begun, request.receive)), media_type="application/json")

    return router


def stream(context: GatewayContext, begun: Begun) -> EventStream:
    """The run as chunks, from behind the event that the caller named."""
    chunks = Chunks(begun.driven.state, begun.after)
    return EventStream(context, begun.driven, chunks, begun.permit, begun.seconds)
