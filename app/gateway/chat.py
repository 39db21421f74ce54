"""`POST /v1/chat/completions`: key, body, admission, run, reply, in this order.

Nothing costs money before the last check.
"""

from typing import Annotated

from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.errors import PlanRejected
from app.gateway import fault
from app.gateway.admission import Admission, Permit
from app.gateway.auth import Caller, Keys
from app.gateway.gate import Gate
from app.gateway.ingress import read_json
from app.gateway.openai_chat import ChatRequest, read_request, resolve_tier, to_order
from app.gateway.openai_reply import Chunks, completion
from app.gateway.sse import EventStream, collect
from app.order import Driven, Order


def routes(gate: Gate, keys: Keys, admission: Admission) -> APIRouter:
    """The routes of the chat wire format."""
    router = APIRouter()
    writer = keys.needs("runs:write")

    @router.post("/v1/chat/completions")
    async def chat(request: Request, caller: Annotated[Caller, Depends(writer)]) -> Response:
        body, ignored = read_request(await read_json(request, gate.bounds))
        tier = resolve_tier(gate.catalog(), caller.key, body.model)
        order = to_order(body, ignored, tier, caller.key)
        permit = admission.enter(caller.key, request.scope["baton.headers"])
        streamed = False
        try:
            driven = await _start(gate, order)
            request.scope["baton.headers"].append((b"x-baton-run", driven.run.encode()))
            if order.streams:
                streamed = True
                return _stream(gate, driven, order, body, permit)
            return await _whole(gate, driven, order, request)
        finally:
            if not streamed:
                permit.release()

    return router


async def _start(gate: Gate, order: Order) -> Driven:
    try:
        return await gate.drivers.start(order)
    except PlanRejected as error:
        raise fault.of_plan(error) from None


async def _whole(gate: Gate, driven: Driven, order: Order, request: Request) -> Response:
    created = int(gate.now())
    ended = await collect(gate, driven, request.receive, order.limits.seconds)
    if ended.error is not None:
        raise ended.error
    return Response(completion(ended, created, gate.catalog().rehearsal), media_type="application/json")


def _stream(gate: Gate, driven: Driven, order: Order, body: ChatRequest, permit: Permit) -> EventStream:
    usage = body.stream_options is not None and body.stream_options.include_usage
    rehearsal = gate.catalog().rehearsal
    chunks = Chunks(driven.run, order.tier.name, int(gate.now()), usage=usage, rehearsal=rehearsal)
    return EventStream(gate, driven, chunks, permit, order.limits.seconds)
