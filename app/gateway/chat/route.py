"""`POST /v1/chat/completions`: key, body, admission, run, reply, in this order.

Nothing costs money before the last check. The replies are the completion object, its chunks, and the `baton` field of
both. `usage` keeps OpenAI's identity over what the caller can see of this turn; the orchestration stands beside it
(DESIGN §6). A run that calls the caller's tools has several turns: `baton.turn` is this one's, `baton.usage` the run's
so far. Chunks of a stream are cut from one template, so that a delta costs the encoding of its text and nothing else.
"""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final

import orjson
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from app.core.message.chat import Decoded, ToolDelta, append_piece, sum_usages
from app.core.run import caller_view
from app.core.run.caller_view import dollars, usage_figures, usage_of
from app.core.run.identifiers import format_reply_id
from app.core.run.progress import parent_of
from app.core.run.state import RunState, StepState
from app.engine.delivery.messages import AnswerPart, StepEvent, TurnEnd
from app.engine.runs.admission import Order
from app.errors import BatonError
from app.gateway.chat.request import ChatRequest, order_of_chat, read_request, wire_calls
from app.gateway.http import fault
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.direct import Direct
from app.gateway.http.idempotency import Idempotency, OpenTurn
from app.gateway.http.sse import EventStream, collect
from app.gateway.openapi import chat_replies, operations, replies
from app.gateway.wire import custom_tools
from app.gateway.wire.parameters import PARAMETERS, resolve_tier
from app.gateway.wire.request_schemas import build_schema

TERMINAL: Final = "[DONE]"
"""The data of the last event of a stream that did not end with an error."""
SCHEMAS: Final[operations.Schemas] = {
    "ChatRequest": lambda: build_schema(ChatRequest, "ChatRequest", PARAMETERS, ("model", "messages")),
    "ChatCompletionEvent": lambda: operations.event_schema(chat_replies.ChatCompletionChunk | replies.Error),
}
EXAMPLE: Final = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return the route of the chat wire format."""
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

        async def order() -> Order:
            return to_order(context, caller, body)

        turn = await idempotency.begin(request, caller, body, order)
        return await reply_to_turn(context, request, turn, streams=body.get("stream") is True)

    return router


def to_order(context: GatewayContext, caller: Caller, body: Mapping[str, object]) -> Order:
    """Return the order of a run for a request. Raises `InvalidRequest` and `NotFound`."""
    chat_request, ignored = read_request(body)
    tier = resolve_tier(context.catalog(), caller.key, chat_request.model)
    return order_of_chat(chat_request, ignored, tier, caller.key)


async def reply_to_turn(context: GatewayContext, request: Request, turn: OpenTurn, *, streams: bool) -> Response:
    """Return the reply of a run, whole or as a stream: as this request asks, which need not have begun the turn."""
    if streams:
        return stream(context, turn)
    return Response(completion(await collect(context, turn, request.receive)), media_type="application/json")


def stream(context: GatewayContext, turn: OpenTurn) -> EventStream:
    """Return the turn as chunks, from behind the event that the caller named."""
    return EventStream(context, turn, Chunks(turn.run.state, turn.after))


# -- the replies


def extension(end: TurnEnd) -> dict[str, Any]:
    """Return the `baton` field of a reply."""
    state = end.state
    proposal = state.proposal
    field: dict[str, Any] = {
        "run": state.run,
        "tier": state.admitted.tier,
        "state": state.state,
        "topology": state.topology if proposal is not None else None,
        "conductor": proposal.conductor if proposal is not None else state.admitted.conductor,
        "degraded": state.degraded,
        "rounds": state.round_count,
        "proposals": proposals(state),
        "steps": [step_figures(state, step) for step in state.steps.values()],
        "usage": usage_figures(end.bill.total),
        "cost_usd": dollars(end.bill.usd),
        "turn": {
            "number": state.turn.number,
            "usage": usage_figures(end.bill.turn),
            "cost_usd": dollars(end.bill.turn_usd),
        },
        "audit": f"/v1/runs/{state.run}",
    }
    if state.admitted.rehearsal:
        field["rehearsal"] = True
    question = state.approval_question
    if question is not None and state.state == "awaiting_approval":
        field["approval"] = {
            "digest": question.digest,
            "reasons": list(question.reasons),
            "expires_at": question.until,
            "url": f"/v1/approvals/{state.run}",
        }
    return field


def words_of(end: TurnEnd) -> str:
    """Return the text of a reply: the answer, or a sentence where a plan waits for an approval, for people who read
    only that."""
    if end.state.state != "awaiting_approval":
        return end.answer
    return (
        f"This request waits for an approval of its plan, of which nothing was executed. Run {end.state.run} goes on "
        f"by itself once it is approved; GET /v1/runs/{end.state.run}/stream has the answer then."
    )


def proposals(state: RunState) -> list[dict[str, Any]]:
    """Return the workflows that were proposed, and their states."""
    rows: list[dict[str, Any]] = []
    for proposal in state.all_proposals:
        row = {
            "mode": proposal.mode,
            "round": proposal.round,
            "conductor": proposal.conductor,
            "state": proposal.state,
            "reasons": list(proposal.reasons),
        }
        if proposal.parent is not None:
            row["parent"] = proposal.parent
        rows.append(row)
    return rows


def step_figures(state: RunState, step: StepState) -> dict[str, Any]:
    """Return one step with the sum over its attempts. `parent` is the step in which its workflow is nested."""
    calls = [call for call in state.calls.values() if call.step == step.n]
    row = {
        "n": step.n,
        "worker": step.worker,
        "access": step.access.as_list(),
        "state": step.state,
        "usage": usage_figures(sum_usages(call.usage for call in calls)),
        "cost_usd": dollars(sum(call.usd for call in calls)),
        "seconds": sum(call.seconds for call in calls),
    }
    parent = parent_of(state, step)
    if parent is not None:
        row["parent"] = parent.n
    return row


def completion_id(state: RunState) -> str:
    """Return the id of the turn's chat completion, which any turn has: `GET /v1/runs/{id}/stream` streams it as one."""
    return format_reply_id("chat", state.run, state.turn.number)


def custom_tool_names(state: RunState) -> frozenset[str]:
    """Return the turn's tools that take free text, by name."""
    return frozenset(state.turn.wire.get("custom", ()))


def completion(end: TurnEnd) -> bytes:
    """Return a whole `chat.completion`: the same bytes whenever it is made, since all of it is in the journal."""
    state = end.state
    message: dict[str, Any] = {"role": "assistant", "content": words_of(end), "refusal": None}
    if end.calls:
        message |= {"content": end.answer or None, "tool_calls": wire_calls(end.calls, custom_tool_names(state))}
    elif end.refusal:
        message |= {"content": None, "refusal": end.answer}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": end.finish or "stop"}
    if end.logprobs is not None:
        choice["logprobs"] = _logprobs(end.logprobs, end.refusal)
    return orjson.dumps(
        {
            "id": completion_id(state),
            "object": "chat.completion",
            "created": int(state.turn.at),
            "model": state.admitted.tier,
            "choices": [choice],
            "usage": usage_of(end.bill),
            "service_tier": "default",
            "system_fingerprint": None,
            "baton": extension(end),
        }
    )


def _logprobs(logprobs: Sequence[Decoded], refusal: bool) -> dict[str, Any]:
    if refusal:
        return {"content": None, "refusal": logprobs}
    return {"content": logprobs, "refusal": None}


class Chunks:
    """The frames of one stream. With `usage` every chunk but the last says `usage: null`, as OpenAI's do.

    Each frame's `id:` is its event number (`run/caller_view.py`); those up to `after` are left out.
    """

    ping = b": ping\n"

    def __init__(self, state: RunState, after: int | None = None) -> None:
        start = {
            "id": completion_id(state),
            "object": "chat.completion.chunk",
            "created": int(state.turn.at),
            "model": state.admitted.tier,
            "service_tier": "default",
            "system_fingerprint": None,
        }
        self._after = -1 if after is None else after
        self._at = max(self._after, 0)
        """The number of the latest event."""
        self._head = b"data: " + orjson.dumps(start)[:-1]
        self._usage = bool(state.turn.wire.get("usage"))
        self._null = b',"usage":null' if self._usage else b""
        self._content_start = self._head + b',"choices":[{"index":0,"delta":{"content":'
        self._refusal_start = self._head + b',"choices":[{"index":0,"delta":{"refusal":'
        self._text_end = b',"finish_reason":null}]' + self._null + b"}\n\n"
        self._custom_tools = custom_tool_names(state)
        self._custom_arguments: dict[int, list[str] | None] = {}
        """The arguments of calls of custom tools, by the call's place; None once the text was sent."""

    def opening(self) -> bytes:
        """Return the first chunk."""
        if self._after >= 0:
            return b""
        delta = {"role": "assistant", "content": "", "refusal": None}
        return b"id: 0\n" + self._chunk(delta, None, b"")

    def answer_part(self, part: AnswerPart) -> bytes:
        """Return more of the answer, with the log-probabilities of its tokens if they were asked for; then more of tool
        calls, which have no event number of their own."""
        self._at = part.at
        calls = b"".join(map(self._more_of_call, part.calls))
        if part.calls and not part.text:
            return calls
        logprobs = b"null"
        if part.logprobs:
            logprobs = orjson.dumps(_logprobs(part.logprobs, part.refusal))
        start = self._refusal_start if part.refusal else self._content_start
        text = start + orjson.dumps(part.text) + b'},"logprobs":' + logprobs + self._text_end
        return b"id: %d\n" % part.at + text + calls

    def _more_of_call(self, delta: ToolDelta) -> bytes:
        """Return more of a tool call. Its first piece has the name, and only that one has the id."""
        is_custom = delta.name in self._custom_tools or delta.index in self._custom_arguments
        if not is_custom:
            function = {"arguments": delta.arguments}
            if delta.name:
                function = {"name": delta.name} | function
            return self._call(delta.index, "function", delta.id if delta.name else None, function)
        if not delta.name:
            return self._more_text(delta)
        self._custom_arguments[delta.index] = []
        opening = self._call(delta.index, "custom", delta.id, {"name": delta.name, "input": ""})
        return opening + self._more_text(delta)

    def _more_text(self, delta: ToolDelta) -> bytes:
        """Return the text of a custom tool's call, which its arguments hold as JSON, once it is whole."""
        pieces = self._custom_arguments[delta.index]
        if pieces is None:
            return b""
        append_piece(pieces, delta.arguments)
        text = None
        if delta.arguments.rstrip().endswith("}"):
            text = custom_tools.parse_input("".join(pieces))
        if text is None:
            return b""
        return self._custom_text(delta.index, text)

    def _custom_text(self, index: int, text: str) -> bytes:
        self._custom_arguments[index] = None
        return self._call(index, "custom", None, {"input": text})

    def _call(self, index: int, kind: str, id_: str | None, body: Mapping[str, object]) -> bytes:
        """Return a piece of a tool call; the first one has the call's id and type."""
        call: dict[str, object] = {"index": index}
        if id_ is not None:
            call |= {"id": id_, "type": kind}
        call[kind] = body
        return self._chunk({"tool_calls": [call]}, None, b"")

    def step_event(self, event: StepEvent) -> bytes:
        """Return a step's event, on a chunk whose delta is empty: clients that do not know `baton` see nothing new in
        it."""
        return b"id: %d\n" % self._at + self._chunk({}, None, _baton({"event": event.kind, **event.body}))

    def closing(self, end: TurnEnd) -> bytes:
        """Return the chunk with the finish reason, the usage chunk if asked for, and the terminal marker. While a plan
        waits for an approval none of them has a number: the stream goes on behind the same event once it is
        approved."""
        usage = self._head + b',"choices":[],"usage":' + orjson.dumps(usage_of(end.bill)) + b"}\n\n"
        if end.state.state == "awaiting_approval":
            chunk = self._chunk({"content": words_of(end)}, None, b"")
            chunk += self._chunk({}, "stop", _baton(extension(end)))
            return chunk + (usage if self._usage else b"") + b"data: [DONE]\n\n"
        frames = self._unsent_texts(end)
        finish = self._chunk({}, end.finish or "stop", _baton(extension(end)))
        last = [(caller_view.FINISH, finish), (caller_view.USAGE, usage), (caller_view.DONE, b"data: [DONE]\n\n")]
        end_of_text = caller_view.end_position(end.state).number
        for place, frame in last:
            number = end_of_text + place
            if place == caller_view.USAGE and not self._usage:
                continue
            if number > self._after:
                frames += b"id: %d\n" % number + frame
        return frames

    def _unsent_texts(self, end: TurnEnd) -> bytes:
        """Return the texts of custom tools' calls that were not whole before the end."""
        frames = b""
        for index, pieces in self._custom_arguments.items():
            if pieces is not None and index < len(end.calls):
                frames += self._custom_text(index, custom_tools.text_of(end.calls[index].arguments))
        return frames

    def failure(self, error: BatonError, end: TurnEnd) -> bytes:
        """Return an error event; no terminal marker follows."""
        return b"data: " + orjson.dumps(fault.describe(error)) + b"\n\n"

    def _chunk(self, delta: Mapping[str, object], finish: str | None, more: bytes) -> bytes:
        choices = [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
        return self._head + b',"choices":' + orjson.dumps(choices) + self._null + more + b"}\n\n"


def _baton(field: Mapping[str, object]) -> bytes:
    return b',"baton":' + orjson.dumps(field)
