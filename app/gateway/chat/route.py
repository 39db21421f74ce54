"""`POST /v1/chat/completions`: key, body, admission, run, reply, in this order.

Nothing costs money before the last check.
"""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.engine.runs.request import Order
from app.gateway.chat.reply import Chunks, completion
from app.gateway.chat.request import read_request, to_order
from app.gateway.http.auth import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.direct import Direct
from app.gateway.http.idempotency import Begun, OnceOnly
from app.gateway.http.ingress import read_json
from app.gateway.http.sse import EventStream, collect
from app.gateway.wire.baton_options import resolve_tier


def routes(context: GatewayContext, keys: Keys, once: OnceOnly) -> APIRouter:
    """The routes of the chat wire format."""
    router = APIRouter(route_class=Direct)
    writer = keys.needs("runs:write")

    @router.post("/v1/chat/completions", dependencies=[once.room])
    async def chat(request: Request, caller: Annotated[Caller, Depends(writer)]) -> Response:
        body = await read_json(request, context.bounds)

        def order() -> Order:
            asked, ignored = read_request(body)
            return to_order(asked, ignored, resolve_tier(context.catalog(), caller.key, asked.model), caller.key)

        begun = await once.begin(request, caller, body, order)
        if begun.driven.state.streams:
            return stream(context, begun)
        return Response(completion(await collect(context, begun, request.receive)), media_type="application/json")

    return router


def stream(context: GatewayContext, begun: Begun) -> EventStream:
    """The run as chunks, from behind the event that the caller named."""
    chunks = Chunks(begun.driven.state, begun.after)
    return EventStream(context, begun.driven, chunks, begun.permit, begun.seconds)
