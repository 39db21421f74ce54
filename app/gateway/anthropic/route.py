"""`POST /v1/messages` and `/v1/messages/count_tokens`: Anthropic's format over the same runs as every other.

Everything that `chat.py` promises holds here; errors of these routes have Anthropic's shape (`fault.py`).
"""

from typing import Annotated, Final

import orjson
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.core.pool import budget
from app.engine.runs.request import Order
from app.gateway.anthropic import reply as reply
from app.gateway.anthropic.request import effort_of, read_count, read_request, task_of, whole_task
from app.gateway.http.auth import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.direct import Direct
from app.gateway.http.idempotency import OnceOnly
from app.gateway.http.ingress import read_json
from app.gateway.http.sse import EventStream, collect
from app.gateway.wire.baton_options import order_of, resolve_tier

PREFIX: Final = "/v1/messages"
"""Where errors have Anthropic's shape, and replies Anthropic's name for their id."""


def routes(context: GatewayContext, keys: Keys, once: OnceOnly) -> APIRouter:
    """The routes of the messages wire format."""
    router = APIRouter(route_class=Direct)
    writer = keys.needs("runs:write")

    @router.post("/v1/messages", dependencies=[once.room])
    async def messages(request: Request, caller: Annotated[Caller, Depends(writer)]) -> Response:
        body = await read_json(request, context.bounds)

        def order() -> Order:
            asked, ignored = read_request(body)
            return order_of(
                whole_task(asked),
                resolve_tier(context.catalog(), caller.key, asked.model),
                caller.key,
                model=asked.model,
                effort=effort_of(asked),
                extension=asked.baton,
                streams=asked.stream,
                ignored=ignored,
                wire={"format": "messages"},
            )

        begun = await once.begin(request, caller, body, order)
        if begun.driven.state.streams:
            request_id = request.scope["baton.headers"][0][1].decode()
            events = reply.Events(begun.driven.state, request_id, begun.after)
            return EventStream(context, begun.driven, events, begun.permit, begun.seconds)
        return Response(reply.message(await collect(context, begun, request.receive)), media_type="application/json")

    @router.post("/v1/messages/count_tokens")
    async def count(request: Request, caller: Annotated[Caller, Depends(writer)]) -> Response:
        body = await read_json(request, context.bounds)

        async def counted() -> Response:
            asked = read_count(body)
            resolve_tier(context.catalog(), caller.key, asked.model)
            task = task_of(asked)
            likely = budget.estimate(task.messages, "").input + budget.tool_bytes(task.toolbox) // 4
            return Response(orjson.dumps({"input_tokens": likely}), media_type="application/json")

        return await once.reply(request, caller, body, counted)

    return router
