"""The replies of `POST /v1/messages`: the message object, the events of its stream, errors and token counts.

`input_tokens` are those that no cache served, as Anthropic counts them; with the cached ones beside them they are what
`usage` of a chat completion says. What Baton adds stands in `baton`.
"""

import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from math import ceil
from typing import Any, Final

import orjson
from starlette.responses import Response

from app.core.run import caller_view
from app.core.run.caller_view import Bill
from app.core.run.state import RunState
from app.engine.delivery.messages import AnswerPart, StepEvent, TurnEnd
from app.errors import BatonError
from app.gateway.anthropic.request import THREAD_UNSUPPORTED
from app.gateway.chat.route import extension, words_of
from app.gateway.http import fault
from app.gateway.wire.call_sequence import CallSequence

RATES: Final = b"x-ratelimit-"
PLACE: Final = re.compile(r"\[(\d+)\]")
"""The place of an entry of a list, as the other wire formats write it."""
STOPS: Final[Mapping[str, str]] = {
    "stop": "end_turn",
    "length": "max_tokens",
    "content_filter": "refusal",
    "tool_calls": "tool_use",
}
TYPES: Final[Mapping[int, str]] = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
"""By status; any other is an `api_error`, or the request's own fault."""


def message(end: TurnEnd, stops: Sequence[str]) -> bytes:
    """Return a whole message; `stops` are the stop sequences of the request."""
    content: list[dict[str, Any]] = []
    text = words_of(end)
    if text:
        content.append({"type": "text", "text": text})
    for call in end.calls:
        content.append(_tool_use(end.state, call.id, call.name) | {"input": orjson.Fragment(call.arguments)})
    return orjson.dumps(
        _head(end.state)
        | {"content": content, "usage": usage_of(end.bill), "baton": extension(end)}
        | _describe_stop(end, stops)
    )


def usage_of(bill: Bill) -> dict[str, Any]:
    """Return the visible tokens; the orchestration's are in `baton`."""
    seen = bill.visible
    return {
        "input_tokens": seen.input - seen.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": seen.cached,
        "output_tokens": seen.output,
        "service_tier": "standard",
    }


def failure(error: BatonError, request_id: str) -> Response:
    """Return the reply to a request that failed before its first byte."""
    body = orjson.dumps(describe_error(error, request_id))
    return Response(body, error.status, fault.headers_of(error), media_type="application/json")


def refuse(status: int, message: str, request_id: str, headers: Mapping[str, str] | None = None) -> Response:
    """Return the reply to a fault that has no class: no such route, no such method, a bug."""
    body = orjson.dumps(_error(status, message, request_id))
    return Response(body, status, dict(headers or {}), media_type="application/json")


def rate_headers(headers: Sequence[tuple[bytes, bytes]], now: float) -> list[tuple[bytes, bytes]]:
    """Return the headers of rates among those of a reply, under Anthropic's names. A reset is a time there, as RFC
    3339."""
    renamed: list[tuple[bytes, bytes]] = []
    for name, value in headers:
        if name.startswith(RATES):
            figure, unit = name.removeprefix(RATES).split(b"-")
            if figure == b"reset":
                at = datetime.fromtimestamp(ceil(now + float(value.rstrip(b"s"))), UTC)
                value = at.strftime("%Y-%m-%dT%H:%M:%SZ").encode()
            renamed.append((b"anthropic-ratelimit-%s-%s" % (unit, figure), value))
    return renamed


def describe_error(error: BatonError, request_id: str) -> dict[str, Any]:
    """Return an error in Anthropic's shape."""
    message = fault.describe(error)["error"]["message"]
    if error.param is not None:  # Anthropic writes `messages.0.content` for `messages[0].content`
        message = message.replace(error.param, PLACE.sub(r".\1", error.param))
    whole = _error(error.status, message, request_id)
    if error.public_code == THREAD_UNSUPPORTED:
        whole["error"]["details"] = {"error_code": THREAD_UNSUPPORTED, "unsupported": [error.param]}
    return whole


def _error(status: int, message: str, request_id: str) -> dict[str, Any]:
    default = "invalid_request_error" if status < 500 else "api_error"
    kind = TYPES.get(status, default)
    return {"type": "error", "error": {"type": kind, "message": message}, "request_id": request_id}


def _head(state: RunState) -> dict[str, Any]:
    id_ = f"msg_{state.run}"
    if state.turn.number:
        id_ += f"_{state.turn.number}"
    return {
        "id": id_,
        "type": "message",
        "role": "assistant",
        "model": state.admitted.tier,
        "container": None,
    }


def _tool_use(state: RunState, call: str, name: str) -> dict[str, Any]:
    name = state.turn.wire.get("names", {}).get(name, name)
    return {"type": "tool_use", "id": call, "name": name, "input": {}, "caller": {"type": "direct"}}


def _describe_stop(end: TurnEnd, stops: Sequence[str]) -> dict[str, Any]:
    """Return why the message stopped. Only some workers say at which stop sequence they stopped; for the others it is
    `end_turn`."""
    reason, sequence = STOPS.get(end.finish, "end_turn"), None
    place = end.stop_sequence
    if end.finish == "stop" and place is not None and place < len(stops):
        reason, sequence = "stop_sequence", stops[place]
    return {"stop_reason": reason, "stop_sequence": sequence, "stop_details": None}


class Events:
    """The frames of one stream: one message, whose blocks come one after the other.

    The `id:` of a frame is its event number (`run/caller_view.py`); those up to `after` are left out. A block's borders
    and tool calls have none: they are sent again.
    """

    ping = b'event: ping\ndata: {"type": "ping"}\n\n'

    def __init__(self, state: RunState, request_id: str, after: int | None = None, stops: Sequence[str] = ()) -> None:
        """`stops` are the stop sequences of the request."""
        self._state = state
        self._stops = stops
        self._request_id = request_id
        self._after = -1 if after is None else after
        self._block = -1
        self._open = ""
        """`text`, or the place of a tool call: what the open block is for."""
        self._sequence = CallSequence()
        if self._after > 0:
            self._block, self._open = 0, "text"

    def opening(self) -> bytes:
        """Return the empty message."""
        usage = {
            "input_tokens": 0,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": "standard",
        }
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None, "stop_details": None}
        message = _head(self._state) | empty | {"usage": usage}
        return self._number_frame(0, _event("message_start", message=message))

    def answer_part(self, part: AnswerPart) -> bytes:
        """Return more of the text, or of the tool calls behind it."""
        frames = b""
        if part.text:
            if self._open != "text":
                frames += self._start("text", {"type": "text", "text": ""})
            frames += self._number_frame(part.at, self._delta({"type": "text_delta", "text": part.text}))
        for delta in self._sequence.take(part.calls):
            if self._open != str(delta.index):
                frames += self._start(str(delta.index), _tool_use(self._state, delta.id, delta.name))
            if delta.arguments:
                frames += self._delta({"type": "input_json_delta", "partial_json": delta.arguments})
        return frames

    def step_event(self, event: StepEvent) -> bytes:
        """Return a step's event, on a ping: clients that do not know `baton` see nothing new in it."""
        return _event("ping", baton={"event": event.kind, **event.body})

    def closing(self, end: TurnEnd) -> bytes:
        """Return the last block's end, why the message stopped, and the terminal marker; without numbers while a plan
        waits for an approval, so that the stream goes on behind the same event once it is approved."""
        delta = _describe_stop(end, self._stops) | {"container": None}
        usage = {name: value for name, value in usage_of(end.bill).items() if name != "service_tier"}
        last = _event("message_delta", delta=delta, usage=usage, baton=extension(end))
        if end.state.state == "awaiting_approval":
            block = self._start("text", {"type": "text", "text": ""})
            block += self._delta({"type": "text_delta", "text": words_of(end)}) + self._stop()
            return block + last + _event("message_stop")
        end_of_text = caller_view.end_position(end.state).number
        frames = b""
        if end_of_text + caller_view.FINISH > self._after:
            frames = self._stop()
        finish = self._number_frame(end_of_text + caller_view.FINISH, last)
        return frames + finish + self._number_frame(end_of_text + caller_view.DONE, _event("message_stop"))

    def failure(self, error: BatonError, end: TurnEnd) -> bytes:
        """Return the last event of a stream that failed."""
        return b"event: error\ndata: " + orjson.dumps(describe_error(error, self._request_id)) + b"\n\n"

    def _number_frame(self, number: int, frame: bytes) -> bytes:
        if number > self._after:
            return b"id: %d\n" % number + frame
        return b""

    def _start(self, what: str, block: Mapping[str, Any]) -> bytes:
        before = self._stop()
        self._block += 1
        self._open = what
        return before + _event("content_block_start", index=self._block, content_block=block)

    def _delta(self, delta: Mapping[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._block, delta=delta)

    def _stop(self) -> bytes:
        if not self._open:
            return b""
        self._open = ""
        return _event("content_block_stop", index=self._block)


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (kind.encode(), orjson.dumps({"type": kind, **fields}))
