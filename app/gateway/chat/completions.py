"""`POST /v1/completions`, OpenAI's legacy route: the prompt is a user's message, and the rest is as for chat."""

from collections.abc import Mapping
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter
from msgspec.structs import replace
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from app.core.run.caller_view import usage_of
from app.core.run.identifiers import format_reply_id
from app.core.run.state import RunState
from app.engine.delivery.messages import AnswerPart, TurnEnd
from app.engine.runs.admission import Order
from app.errors import InvalidRequest
from app.gateway.chat.request import ChatRequest, order_of_chat, read_request
from app.gateway.chat.route import TERMINAL, Chunks, extension, words_of
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.direct import Direct
from app.gateway.http.idempotency import Idempotency
from app.gateway.http.sse import EventStream, collect
from app.gateway.openapi import chat_replies, operations, replies
from app.gateway.wire.parameters import COMPLETIONS, resolve_tier, sort_fields
from app.gateway.wire.request_schemas import build_schema

SCHEMAS: Final[operations.Schemas] = {
    "CompletionRequest": lambda: build_schema(CompletionRequest, "CompletionRequest", COMPLETIONS, ("model", "prompt")),
    "TextCompletionEvent": lambda: operations.event_schema(chat_replies.TextCompletionChunk | replies.Error),
}


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return the legacy route."""
    router = APIRouter(route_class=Direct, tags=["chat"])

    @router.post(
        "/v1/completions",
        operation_id="create_completion",
        summary="Answer a prompt (legacy).",
        dependencies=[idempotency.capacity],
        response_model=chat_replies.TextCompletion,
        responses=operations.replies(*operations.RUNNING, events="TextCompletionEvent", terminal=TERMINAL),
        openapi_extra=operations.body(
            "CompletionRequest",
            example={"model": "baton-mini", "prompt": "2 + 2 ="},
        ),
    )
    async def create_completion(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
    ) -> Response:
        """OpenAI's text completion, whole or, with `stream: true`, as server-sent events."""

        async def order() -> Order:
            chat_request, ignored = read_prompt(body)
            tier = resolve_tier(context.catalog(), caller.key, chat_request.model)
            chat_order = order_of_chat(chat_request, ignored, tier, caller.key)
            return replace(chat_order, wire={**chat_order.wire, "format": "completions"})

        turn = await idempotency.begin(request, caller, body, order)
        if body.get("stream") is True:
            return EventStream(context, turn, TextChunks(turn.run.state, turn.after))
        return Response(text_completion(await collect(context, turn, request.receive)), media_type="application/json")

    return router


class CompletionRequest(ChatRequest):
    """The request's fields for the description; `read_prompt` reads them."""

    prompt: str | Annotated[list[str], Field(min_length=1, max_length=1)]


def read_prompt(body: Mapping[str, Any]) -> tuple[ChatRequest, tuple[str, ...]]:
    """Return the request as one for chat, and the names of what is ignored; raises `InvalidRequest` naming the
    field."""
    fields, ignored = sort_fields(body, COMPLETIONS)
    message = {"role": "user", "content": _prompt(fields.pop("prompt", None))}
    request, _ = read_request(fields | {"messages": [message]})
    return request, ignored


def _prompt(value: object) -> str:
    if value is None:
        raise InvalidRequest("Missing required parameter: 'prompt'.", param="prompt", code="missing_required_parameter")
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if not isinstance(value, str):
        raise InvalidRequest(
            "The prompt must be one text: no tokens, and no list of several.", param="prompt", code="invalid_type"
        )
    return value


def text_completion(end: TurnEnd) -> bytes:
    """Return a whole `text_completion`."""
    choice = _choice(words_of(end), end.finish or "stop")
    return orjson.dumps(_head(end.state) | {"choices": [choice], "usage": usage_of(end.bill), "baton": extension(end)})


def _head(state: RunState) -> dict[str, Any]:
    return {
        "id": format_reply_id("completions", state.run, state.turn.number),
        "object": "text_completion",
        "created": int(state.turn.at),
        "model": state.admitted.tier,
        "system_fingerprint": None,
    }


def _choice(text: str, finish: str | None) -> dict[str, Any]:
    return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


class TextChunks(Chunks):
    """The frames of a stream: `text_completion` objects with more of the text."""

    def __init__(self, state: RunState, after: int | None = None) -> None:
        super().__init__(state, after)
        self._head = b"data: " + orjson.dumps(_head(state))[:-1]

    def opening(self) -> bytes:
        """Nobody speaks in this format."""
        return b""

    def answer_part(self, part: AnswerPart) -> bytes:
        """More of the answer."""
        self._at = part.at
        return b"id: %d\n" % part.at + self._frame(_choice(part.text, None), b"")

    def _chunk(self, delta: Mapping[str, object], finish: str | None, more: bytes) -> bytes:
        return self._frame(_choice(str(delta.get("content", "")), finish), more)

    def _frame(self, choice: Mapping[str, object], more: bytes) -> bytes:
        return self._head + b',"choices":' + orjson.dumps([choice]) + self._null + more + b"}\n\n"
