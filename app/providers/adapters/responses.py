"""OpenAI's Responses, which newer OpenAI models need for function tools.

Source: the published reference of `POST /responses` with its streaming events, and the types of the official client.
A stream ends with one of `response.completed`, `response.incomplete` and `response.failed`, each with the whole
response; events of an unknown kind are skipped. Nothing is stored at the provider (`store: false`), so the reasoning of
a turn with tool calls comes back encrypted, is stored here with the order of the turn's items, and is sent again before
the items that it led to, as the reference demands. Reasoning is no part of the answer; its tokens are output tokens.

A conversation stays in order, as `input` items; texts of the assistant are `output_text`. Results of tools may hold
images. The least `max_output_tokens` that the API takes is 16: a smaller limit is sent as 16. The API has no `stop`,
`seed`, penalties or `logit_bias`. Options: `reasoning` (`drop` for models and servers that refuse `include`; models
that are known not to reason are never asked), `ignore`, `logprobs` (`true` where the models return log-probabilities).
"""

import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import orjson

from app.core.message.chat import (
    Document,
    End,
    Finish,
    Form,
    Message,
    Part,
    Piece,
    Sampling,
    Text,
    TextDelta,
    Tool,
    Toolbox,
    Usage,
)
from app.core.message.response_format import is_closed
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import WorkerTruncated, WorkerUnavailable
from app.providers import document, options
from app.providers.authentication import key_headers
from app.providers.document import (
    DOCUMENT_NAME,
    MOST_LOGPROBS,
    StreamedCalls,
    label,
    object_or_empty,
    parse,
    rows,
    tokens,
    usage,
    usage_detail,
    words,
)
from app.providers.faults import error_in_reply, fault, malformed_reply
from app.providers.http import Endpoint, ProviderRequest, exchange
from app.providers.protocol import Request
from app.providers.schemas import for_openai

BASE_URL = "https://api.openai.com/v1"
LEAST_TOKENS = 16
"""The smallest `max_output_tokens` that the API takes."""
LONGEST_ID = 64
WITHOUT_REASONING = re.compile(r"(?:^|[/:])(?:gpt-[34]|chatgpt-|gpt-5(?:\.\d+)?-chat)")
"""Models that refuse `include: ["reasoning.encrypted_content"]`, because they do not reason."""
ENDS = {f"response.{status}": status for status in ("completed", "incomplete", "failed")}
"""The status of the response, by the event that ends a stream."""
INCOMPLETE: dict[str, Finish] = {"max_output_tokens": "length", "content_filter": "content_filter"}
"""Any other reason ends the answer as `length`: it may be incomplete, but it was paid for and is not thrown away."""


class ResponsesProvider:
    """OpenAI's endpoint for responses, or a server that has the same one."""

    def __init__(self, spec: ProviderSpec, key: str | None, proxy_credentials: str | None = None) -> None:
        """Open nothing yet; raises ConfigInvalid. An empty `base_url` means OpenAI's own."""
        options.check(spec)
        secrets = key_headers(spec, key, "authorization", "Bearer ")
        self._endpoint = Endpoint(spec, spec.base_url or BASE_URL, {}, secrets, proxy_credentials)
        self._spec = spec
        self.unsupported = options.list_unsupported(spec)

    def render(self, request: Request) -> bytes:
        """Return the exact request body; see `protocol.Provider`."""
        spec, model = self._spec, request.worker.model
        returns_reasoning = spec.options.get("reasoning") != "drop" and not WITHOUT_REASONING.search(model)
        body: dict[str, Any] = {"model": model, "input": _items(request.messages, returns_reasoning), "store": False}
        body |= _sampling(request.sampling, self.unsupported | request.worker.drops)
        body |= _tools(request.toolbox, strict=spec.structured)
        include: list[str] = []
        if returns_reasoning:
            include.append("reasoning.encrypted_content")
        if request.logprobs is not None:
            include.append("message.output_text.logprobs")
            if request.logprobs:
                body["top_logprobs"] = min(request.logprobs, MOST_LOGPROBS)
        if include:
            body["include"] = include
        if request.form is not None and spec.structured and request.form.is_object:
            body["text"] = {"format": _format(request.form)}
        if spec.streams and request.live:
            body["stream"] = True
        return orjson.dumps(body, default=dict)

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send `body` and yield what comes back; see `protocol.Provider`."""
        sender = f"{request.worker.name} at {self._spec.name}"
        streams = self._spec.streams and request.live
        provider_request = ProviderRequest(
            "/responses", body, deadlines, sender, streams=streams, headers=request.headers
        )
        return exchange(self._endpoint, provider_request, Response(sender))

    async def close(self) -> None:
        """Close all connections."""
        await self._endpoint.close()


def _items(messages: Iterable[Message], returns_reasoning: bool) -> list[dict[str, Any]]:
    """Return the conversation as input items; with `returns_reasoning` stored reasoning is sent back with its turn."""
    items: list[dict[str, Any]] = []
    call_ids: set[str] = set()
    for message in messages:
        if message.role == "assistant":
            items += _turn(message, returns_reasoning)
            call_ids |= {call.id for call in message.calls}
        elif message.call_id in call_ids:
            output: Any = _content(message)
            items.append({"type": "function_call_output", "call_id": _id(message.call_id), "output": output})
        else:
            role = "user" if message.role == "tool" else message.role  # A result of no known call is plain text.
            items.append({"type": "message", "role": role, "content": _content(message)})
    return items


def _turn(message: Message, returns_reasoning: bool) -> list[dict[str, Any]]:
    """Return the items of an assistant's turn, in the order in which its provider gave them, where that is known."""
    remaining: dict[str, list[dict[str, Any]]] = {"message": [], "function_call": []}
    if message.text:
        remaining["message"].append({"type": "message", "role": "assistant", "content": message.text})
    for call in message.calls:
        remaining["function_call"].append(
            {"type": "function_call", "call_id": _id(call.id), "name": call.name, "arguments": call.arguments}
        )
    items: list[dict[str, Any]] = []
    if returns_reasoning and message.keepsake is not None:
        for entry in message.keepsake.get("items", ()):
            if entry["type"] == "reasoning":
                items.append(dict(entry))
            elif remaining[entry["type"]]:
                items.append(remaining[entry["type"]].pop(0) | entry)
    return [*items, *remaining["message"], *remaining["function_call"]]


def _content(message: Message) -> str | list[dict[str, Any]]:
    """Return text as it is, and parts as a list where there is an image or a PDF."""
    if all(isinstance(part, Text) for part in message.parts):
        return message.text
    return [_part(part) for part in message.parts if not isinstance(part, Text) or part.text]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "input_text", "text": part.text}
    if isinstance(part, Document):
        return {"type": "input_file", "filename": part.name or DOCUMENT_NAME, "file_data": part.url}
    return {"type": "input_image", "image_url": part.url, "detail": part.detail or "auto"}


def _id(id_: str) -> str:
    """Return the id of a call, or one derived from it where the API would refuse it; deterministic."""
    if 0 < len(id_) <= LONGEST_ID:
        return id_
    return f"call_{hashlib.sha256(id_.encode()).hexdigest()[:32]}"


def _sampling(sampling: Sampling, unsupported: frozenset[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if sampling.max_tokens is not None:
        fields["max_output_tokens"] = max(sampling.max_tokens, LEAST_TOKENS)
    if sampling.temperature is not None and "temperature" not in unsupported:
        fields["temperature"] = sampling.temperature
    if sampling.top_p is not None and "top_p" not in unsupported:
        fields["top_p"] = sampling.top_p
    return fields


def _tools(toolbox: Toolbox, *, strict: bool) -> dict[str, Any]:
    if not toolbox.tools:
        return {}
    body: dict[str, Any] = {"tools": [_tool(tool, strict) for tool in toolbox.tools]}
    if toolbox.choice == "named":
        body["tool_choice"] = {"type": "function", "name": toolbox.named}
    elif toolbox.choice != "auto":
        body["tool_choice"] = toolbox.choice
    if toolbox.parallel:
        return body
    return body | {"parallel_tool_calls": False}


def _tool(tool: Tool, strict: bool) -> dict[str, Any]:
    """Return a definition. `strict` is always sent, because the API takes an absent one for true."""
    function: dict[str, Any] = {"type": "function", "name": tool.name}
    if tool.description:
        function["description"] = tool.description
    parameters = for_openai(tool.parameters if tool.parameters is not None else document.EMPTY_SCHEMA)
    is_strict = strict and tool.strict and is_closed(parameters)
    return function | {"parameters": parameters, "strict": is_strict}


def _format(form: Form) -> dict[str, Any]:
    if form.schema is None:
        return {"type": "json_object"}
    schema: dict[str, Any] = {"type": "json_schema", "name": form.name}
    if form.description:
        schema["description"] = form.description
    return schema | {"strict": form.strict, "schema": form.schema}


class Response:
    """One reply as it arrives: semantic events, or a whole `response`."""

    __slots__ = ("_calls", "_finish", "_given", "_id", "_items", "_model", "_refused", "_sender", "_usage", "done")

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._calls = StreamedCalls(sender)
        self._items: list[dict[str, Any]] = []
        """The output items that are complete, in order, in the form in which they would be sent back."""
        self._given: set[object] = set()
        """The output indexes of items of which some content was passed on."""
        self._finish: Finish | None = None
        self._model: str | None = None
        self._id: str | None = None
        self._usage: Usage | None = None
        self._refused = False
        self.done = False

    @property
    def complete(self) -> bool:
        """See `http.ReplyReader`: only the marker ends an answer here."""
        return self.done

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        if not data or data.strip() == b"[DONE]":
            return
        document = parse(data, self._sender)
        kind = document.get("type")
        if isinstance(kind, str) and kind in ENDS:
            self._end(object_or_empty(document.get("response"), self._sender), ENDS[kind], pieces)
        elif kind == "error" or document.get("error") is not None:
            raise error_in_reply(self._sender, document)
        elif kind == "response.created":
            self._model = label(object_or_empty(document.get("response"), self._sender).get("model"))
        elif not isinstance(kind, str):
            raise malformed_reply(self._sender, "an event without a type")
        else:
            self._part(kind, document, pieces)

    def read_whole(self, body: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        document = parse(body, self._sender)
        if document.get("error") is not None or document.get("object") == "error":
            raise error_in_reply(self._sender, document)
        self._end(document, words(document.get("status"), self._sender), pieces)

    def end(self) -> End:
        """See `http.ReplyReader`."""
        if self._finish is None:
            raise fault(WorkerTruncated, self._sender, "no end of the response")
        finish = self._calls.finish(self._finish)
        return End(finish, self._usage, self._model, self._refused or finish == "content_filter", id=self._id)

    def keepsake(self) -> dict[str, Any]:
        """See `http.ReplyReader`: the turn's reasoning, and the order of its items."""
        if not len(self._calls) or all(item.keys() == {"type"} for item in self._items):
            return {}
        return {"items": self._items}

    def _part(self, kind: str, document: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Take an event of one output item."""
        place = document.get("output_index")
        if not isinstance(place, int | None):
            raise malformed_reply(self._sender, "a field of the wrong type")
        if kind == "response.output_text.delta":
            self._say(place, document.get("delta"), pieces)
            pieces.extend(tokens(document.get("logprobs"), self._sender))
        elif kind == "response.function_call_arguments.delta":
            self._more(place, words(document.get("delta"), self._sender), pieces)
        elif kind == "response.refusal.delta":
            self._refuse(place, document.get("delta"), pieces)
        elif kind == "response.output_item.added":
            self._begin(place, object_or_empty(document.get("item"), self._sender), pieces)
        elif kind == "response.output_item.done":
            self._item(place, object_or_empty(document.get("item"), self._sender), pieces)

    def _begin(self, place: object, item: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Take an item that begins; only a call says something with that."""
        if item.get("type") == "function_call":
            name, id_ = words(item.get("name"), self._sender), words(item.get("call_id"), self._sender)
            self._calls.take(place, id_, name, "", pieces)

    def _item(self, place: object, item: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Take a complete item: its content only if none of it came before."""
        kind = item.get("type")
        is_new = place not in self._given
        if kind == "reasoning":
            self._items.append({name: value for name, value in item.items() if name != "status" and value is not None})
        elif kind == "message":
            message = {"type": "message"}
            phase = label(item.get("phase"))
            if phase:
                message["phase"] = phase
            self._items.append(message)
            if is_new:
                self._message(item, pieces)
        elif kind == "function_call":
            self._items.append({"type": "function_call"})
            self._begin(place, item, pieces)
            if is_new:
                self._more(place, document.arguments_text(item.get("arguments"), self._sender), pieces)
        self._given.add(place)

    def _message(self, item: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Take all content of a complete message."""
        for part in rows(item.get("content"), self._sender):
            if part.get("type") == "refusal":
                self._refuse(None, part.get("refusal"), pieces)
            else:
                self._say(None, part.get("text"), pieces)
                pieces.extend(tokens(part.get("logprobs"), self._sender))

    def _say(self, place: object, text: object, pieces: list[Piece]) -> None:
        self._given.add(place)
        answer = words(text, self._sender)
        if answer:
            pieces.append(TextDelta(answer))

    def _refuse(self, place: object, text: object, pieces: list[Piece]) -> None:
        self._given.add(place)
        self._refused = True
        refusal = words(text, self._sender)
        if refusal:
            pieces.append(TextDelta(refusal, refusal=True))

    def _more(self, place: object, arguments: str, pieces: list[Piece]) -> None:
        self._given.add(place)
        self._calls.take(place, "", "", arguments, pieces)

    def _end(self, response: Mapping[str, Any], status: str, pieces: list[Piece]) -> None:
        """Take the whole response, which ends a stream and is all of a reply that was not streamed."""
        if status == "failed" or response.get("error") is not None:
            raise error_in_reply(self._sender, {"error": object_or_empty(response.get("error"), self._sender)})
        if status == "cancelled":
            raise fault(WorkerUnavailable, self._sender, "it cancelled its answer")
        if status not in ("completed", "incomplete") or self.done:
            raise malformed_reply(self._sender, "a response without an end")
        if not self._given:
            for place, item in enumerate(rows(response.get("output"), self._sender)):
                self._item(place, item, pieces)
        self._model = label(response.get("model")) or self._model
        self._id = label(response.get("id")) or self._id
        self._usage = _usage(response.get("usage"))
        reason = words(object_or_empty(response.get("incomplete_details"), self._sender).get("reason"), self._sender)
        self._finish = "stop" if status == "completed" else INCOMPLETE.get(reason, "length")
        self.done = True


def _usage(value: object) -> Usage | None:
    if not isinstance(value, dict):
        return None
    cached = usage_detail(value, "input_tokens_details", "cached_tokens")
    reasoning = usage_detail(value, "output_tokens_details", "reasoning_tokens")
    stored = usage_detail(value, "input_tokens_details", "cache_write_tokens")
    return usage(value.get("input_tokens"), value.get("output_tokens"), cached, reasoning, stored)
