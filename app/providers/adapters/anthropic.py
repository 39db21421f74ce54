"""Anthropic's Messages.

Source: the published Messages reference, "Streaming messages" and "Structured outputs". The terminal marker is the
event `message_stop`; usage is cumulative and complete in `message_delta`; events and blocks of an unknown kind are
skipped, as the reference asks. Thinking is no part of the answer; of a turn with tool calls it is stored with its
signatures, and sent back before them, which the API demands while a model thinks. `input_tokens` leaves out what the
cache read or wrote, so all three are added up.

Bedrock (`auth = "aws"`) and Vertex (`auth = "google"`) have the same format under other paths: the model is in the
path and the version in the body (InvokeModel of Bedrock's reference; `rawPredict` of Vertex's).

Temperatures above 1 are sent as 1, the highest there is. Current models refuse `temperature` together with `top_p`:
with both given, `top_p` is left out. So are stop sequences of white space, which the API refuses. There are no
log-probabilities. Options: `anthropic_version` (default 2023-06-01; a worker may name its own), `cache` (`tools`:
requests that offer tools mark the end of the instructions and that of the conversation for the prompt cache, which the
next turn of their loop then reads; default `off`), `ignore`.
"""

import re
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import orjson
from msgspec.structs import replace

from app.core.message.chat import (
    Document,
    End,
    Finish,
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
from app.core.message.response_format import OPEN
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.core.pool.wire_formats import FORMATS
from app.errors import WorkerTruncated
from app.providers import document, options
from app.providers.authentication import key_headers
from app.providers.document import (
    StreamedCalls,
    count,
    label,
    object_or_empty,
    parse,
    position,
    rows,
    usage,
    usage_detail,
    words,
)
from app.providers.eventstream import MessageReader
from app.providers.faults import error_in_reply, fault, malformed_reply
from app.providers.http import Endpoint, ProviderRequest, exchange
from app.providers.protocol import Request
from app.providers.schemas import COMBINING, with_plain_root
from app.providers.turns import OPENING, PlacedCall, ProviderData, Result, TurnPart, inline, turns

BASE_URL = "https://api.anthropic.com"
VERSION = "2023-06-01"
VERSIONS: Mapping[str, str] = {"aws": "bedrock-2023-05-31", "google": "vertex-2023-10-16"}
"""The version that the body of a request names at each cloud."""
FINISH: dict[str, Finish] = {
    "end_turn": "stop",
    "stop_sequence": "stop",
    "max_tokens": "length",
    "model_context_window_exceeded": "length",
    "pause_turn": "length",
    "tool_use": "tool_calls",
    "refusal": "content_filter",
}
"""Any other reason ends the answer as `length`: it may be incomplete, but it was paid for and is not thrown away."""
UNSUPPORTED_KEYWORDS = FORMATS["anthropic"].undecoded
"""Keywords that structured outputs refuse with a 400."""
CONTINUES = re.compile(r"claude-(?:[23]|instant|(?:opus|sonnet|haiku)-4(?:$|@|-20|-[0-5](?!\d)))")
"""The models of Claude that continue a last turn of the assistant: up to 4.5. The API refuses one of later models."""
STRICT_TOOLS, OPTIONAL_PARAMETERS, UNIONS = 20, 24, 16
"""The most strict tools of a request, and the most optional parameters and unions of types in all of their schemas."""
FAILURE = "The tool failed and returned nothing."
"""The result of a call that failed, where the caller sends no words: the API refuses it without any."""
REFUSED_KEYWORDS = OPEN - {"allOf"}
"""Keywords that they refuse as well, and that cannot be left out: the schema would mean something else."""


UNCACHED_BLOCKS = frozenset(("thinking", "redacted_thinking"))


class AnthropicProvider:
    """Anthropic's endpoint, or one that speaks its format."""

    def __init__(self, spec: ProviderSpec, key: str | None, proxy_credentials: str | None = None) -> None:
        """Open nothing yet; raises ConfigInvalid. An empty `base_url` means Anthropic's own; `/v1` may end it."""
        options.check(spec)
        self._version = spec.options.get("anthropic_version", VERSIONS.get(spec.auth, VERSION))
        headers: dict[str, str] = {}
        if spec.auth not in VERSIONS:
            headers["anthropic-version"] = self._version
        base_url = (spec.base_url or BASE_URL).rstrip("/").removesuffix("/v1")
        secrets = key_headers(spec, key, "x-api-key")
        self._endpoint = Endpoint(spec, base_url, headers, secrets, proxy_credentials)
        self._spec = spec
        self.unsupported = options.list_unsupported(spec)

    def render(self, request: Request) -> bytes:
        """Return the exact request body; see `protocol.Provider`."""
        conversation = turns(tuple(map(_without_blank_text, request.messages)))
        body: dict[str, Any] = {"model": request.worker.model}
        if self._spec.auth in VERSIONS:
            body = {"anthropic_version": request.worker.api_version or self._version}
        body["max_tokens"] = request.sampling.max_tokens
        if conversation.instructions:
            body["system"] = [{"type": "text", "text": text} for text in conversation.instructions]
        body["messages"] = _messages(conversation.turns, request.worker.model)
        body |= _sampling(request.sampling, self.unsupported | request.worker.drops)
        strict = _drop_unsupported_keywords if self._spec.structured else None
        body |= _tools(request.toolbox, request.messages, strict)
        if request.form is not None and request.form.schema is not None and self._spec.structured:
            schema = request.form.schema
            if request.form.strict or self._spec.keeps_open or _is_decodable(schema):
                body["output_config"] = {
                    "format": {"type": "json_schema", "schema": _drop_unsupported_keywords(schema)}
                }
        if self._spec.streams and request.live and self._spec.auth != "aws":
            body["stream"] = True
        if self._spec.options.get("cache") == "tools" and request.toolbox.tools:
            _mark_for_cache(body)
        return orjson.dumps(body, default=dict)

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send `body` and yield what comes back; see `protocol.Provider`."""
        sender = f"{request.worker.name} at {self._spec.name}"
        streams = self._spec.streams and request.live
        headers = dict(request.headers)
        if request.worker.api_version and self._spec.auth not in VERSIONS:
            headers.setdefault("anthropic-version", request.worker.api_version)
        path = _path(self._spec.auth, request.worker.model, streams)
        provider_request = ProviderRequest(path, body, deadlines, sender, streams=streams, headers=headers)
        decoder = MessageReader(sender) if streams and self._spec.auth == "aws" else None
        return exchange(self._endpoint, provider_request, Reply(sender), decoder)

    async def close(self) -> None:
        """Close all connections."""
        await self._endpoint.close()


def _without_blank_text(message: Message) -> Message:
    """Return a message without its texts, if they are white space alone, which the API refuses."""
    if not message.parts or message.text.strip():
        return message
    return replace(message, parts=tuple(part for part in message.parts if not isinstance(part, Text)))


def _messages(all_turns: Iterable[tuple[bool, tuple[TurnPart, ...]]], model: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = []
    ids = CallIds()
    for is_user, parts in all_turns:
        blocks: list[dict[str, Any]] = []
        for part in parts:
            blocks += _blocks(part, ids)
        messages.append({"role": "user" if is_user else "assistant", "content": blocks})
    if messages[-1]["role"] == "user":
        return messages
    _trim(messages[-1]["content"])
    if "claude-" in model and not CONTINUES.search(model):
        messages.append({"role": "user", "content": [_block(OPENING)]})
    return messages


def _mark_for_cache(body: Mapping[str, Any]) -> None:
    """Mark the last block of the instructions and of the conversation; no block of thinking may be marked."""
    for blocks in (body.get("system"), body["messages"][-1]["content"]):
        if blocks and blocks[-1]["type"] not in UNCACHED_BLOCKS:
            blocks[-1] = blocks[-1] | {"cache_control": {"type": "ephemeral"}}


def _path(auth: str, model: str, streams: bool) -> str:
    if auth == "aws":
        # aiohttp sends a quoted colon unquoted, and what is signed must be what is sent.
        verb = "invoke-with-response-stream" if streams else "invoke"
        return f"/model/{quote(model, safe=':@')}/{verb}"
    if auth == "google":
        verb = "streamRawPredict" if streams else "rawPredict"
        return f"/models/{quote(model, safe='@')}:{verb}"
    return "/v1/messages"


def _blocks(part_of_turn: TurnPart, ids: "CallIds") -> list[dict[str, Any]]:
    if isinstance(part_of_turn, ProviderData):
        return list(part_of_turn.data.get("blocks", ()))
    if isinstance(part_of_turn, PlacedCall):
        call = part_of_turn.call
        arguments = document.arguments_object(call.arguments)
        return [{"type": "tool_use", "id": ids.begin(call.id), "name": call.name, "input": arguments}]
    if isinstance(part_of_turn, Result):
        content = [_block(part) for part in part_of_turn.parts]
        result: dict[str, Any] = {
            "type": "tool_result",
            "tool_use_id": ids.latest[part_of_turn.called.call.id],
            "content": content,
        }
        if part_of_turn.failed:
            result |= {"is_error": True, "content": content or [{"type": "text", "text": FAILURE}]}
        return [result]
    return [_block(part_of_turn)]


def _block(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    data = inline(part)
    source = {"type": "url", "url": part.url}
    if data is not None:
        media = "image/jpeg" if data[0] == "image/jpg" else data[0]  # OpenAI takes both names
        source = {"type": "base64", "media_type": media, "data": data[1]}
    if not isinstance(part, Document):
        return {"type": "image", "source": source}
    block: dict[str, Any] = {"type": "document", "source": source}
    if part.name:
        block["title"] = part.name
    return block


class CallIds:
    """The ids of a conversation's calls as Anthropic takes them: of its characters, and each only once. Other servers
    take the ids of an earlier turn again."""

    def __init__(self) -> None:
        self.latest: dict[str, str] = {}
        """The id that the latest call of each id was sent under."""
        self._used: set[str] = set()

    def begin(self, id_: str) -> str:
        """Return the id of the next call, which has this id elsewhere."""
        accepted = re.sub(r"[^A-Za-z0-9_-]", "_", id_)
        unused, number = accepted, 1
        while unused in self._used:
            number += 1
            unused = f"{accepted}_{number}"
        self._used.add(unused)
        self.latest[id_] = unused
        return unused


def _trim(blocks: list[dict[str, Any]]) -> None:
    """Strip the end of a last turn of the assistant: it is the answer's beginning and may not end in white space."""
    while blocks and blocks[-1]["type"] == "text":
        blocks[-1]["text"] = blocks[-1]["text"].rstrip()
        if blocks[-1]["text"]:
            return
        blocks.pop()


def _sampling(sampling: Sampling, unsupported: frozenset[str]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if sampling.temperature is not None and "temperature" not in unsupported:
        fields["temperature"] = min(sampling.temperature, 1.0)
    elif sampling.top_p is not None and "top_p" not in unsupported:
        fields["top_p"] = sampling.top_p
    stops = [stop for stop in sampling.stop if stop.strip()]
    if stops and "stop" not in unsupported:
        fields["stop_sequences"] = stops
    return fields


def _tools(toolbox: Toolbox, messages: Iterable[Message], strict: Callable[[Any], Any] | None) -> dict[str, Any]:
    """Return `tools` and `tool_choice`; `strict` converts a schema to one that the endpoint can constrain decoding to.

    A conversation that has calls but offers no tools needs their definitions all the same: they are made from the
    names, and may not be called.
    """
    if not toolbox.tools:
        earlier: dict[str, dict[str, Any]] = {}
        for message in messages:
            for call in message.calls:
                earlier[call.name] = {"name": call.name, "input_schema": document.EMPTY_SCHEMA}
        if not earlier:
            return {}
        return {"tools": list(earlier.values()), "tool_choice": {"type": "none"}}
    kinds = {"auto": "auto", "none": "none", "required": "any", "named": "tool"}
    choice: dict[str, Any] = {"type": kinds[toolbox.choice]}
    if toolbox.choice == "named":
        choice["name"] = toolbox.named
    if not toolbox.parallel and toolbox.choice != "none":
        choice["disable_parallel_tool_use"] = True
    if not _fits_decoders([tool.parameters for tool in toolbox.tools if tool.strict]):
        strict = None
    body: dict[str, Any] = {"tools": [_tool(tool, strict) for tool in toolbox.tools]}
    if choice == {"type": "auto"}:
        return body
    return body | {"tool_choice": choice}


def _tool(tool: Tool, strict: Callable[[Any], Any] | None) -> dict[str, Any]:
    definition: dict[str, Any] = {"name": tool.name}
    if tool.description:
        definition["description"] = tool.description
    schema = with_plain_root({"type": "object", **(tool.parameters or document.EMPTY_SCHEMA)}, COMBINING)
    if strict is None or not tool.strict or not _is_decodable(schema):
        return definition | {"input_schema": schema}
    return definition | {"input_schema": strict(schema), "strict": True}


def _fits_decoders(schemas: Sequence[object]) -> bool:
    """Return whether the schemas of a request's strict tools are within what the API can constrain decoding to."""
    optional, unions = 0, 0
    left = list(schemas)
    while left:
        part = left.pop()
        if isinstance(part, list | tuple):
            left += part
        if not isinstance(part, Mapping):
            continue
        properties = part.get("properties")
        if isinstance(properties, Mapping):
            optional += len(properties.keys() - set(part.get("required", ())))
        unions += "anyOf" in part or isinstance(part.get("type"), list | tuple)
        left += part.values()
    return len(schemas) <= STRICT_TOOLS and optional <= OPTIONAL_PARAMETERS and unions <= UNIONS


def _is_decodable(schema: object) -> bool:
    """Return whether the API constrains decoding to a schema: it refuses open objects, and most ways to combine
    schemas."""
    if isinstance(schema, list | tuple):
        return all(map(_is_decodable, schema))
    if not isinstance(schema, Mapping):
        return True
    kinds = schema.get("type")
    is_object = "object" in (kinds if isinstance(kinds, list | tuple) else [kinds])
    if schema.keys() & REFUSED_KEYWORDS or (is_object and schema.get("additionalProperties") is not False):
        return False
    for name, value in schema.items():
        inner = value.values() if name in ("properties", "$defs") and isinstance(value, Mapping) else [value]
        if not all(map(_is_decodable, inner)):
            return False
    return True


def _drop_unsupported_keywords(schema: object) -> Any:
    """Return the schema without the keywords that Anthropic refuses; keys of `properties` are names, not keywords."""
    if isinstance(schema, list | tuple):
        return [_drop_unsupported_keywords(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    loosened: dict[str, Any] = {}
    for name, value in schema.items():
        if name in UNSUPPORTED_KEYWORDS:
            continue
        if name in ("properties", "$defs"):
            if isinstance(value, Mapping):
                value = {key: _drop_unsupported_keywords(part) for key, part in value.items()}
            loosened[name] = value
        elif name in ("enum", "const", "required", "default"):
            loosened[name] = value
        else:
            loosened[name] = _drop_unsupported_keywords(value)
    return loosened


class Reply:
    """One reply as it arrives: named events, or a whole `message`."""

    __slots__ = ("_calls", "_counts", "_finish", "_id", "_model", "_sender", "_stop_sequence", "_thoughts", "done")

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._calls = StreamedCalls(sender)
        self._thoughts: dict[object, dict[str, Any]] = {}
        self._finish: Finish | None = None
        self._stop_sequence = ""
        self._model: str | None = None
        self._id: str | None = None
        self._counts: dict[str, Any] = {}
        self.done = False

    @property
    def complete(self) -> bool:
        """See `http.ReplyReader`: only the marker ends an answer here."""
        return self.done

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        if not data:
            return
        document = parse(data, self._sender)
        kind = document.get("type")
        index = position(document.get("index"), self._sender)
        if kind == "content_block_delta":
            self._more(index, object_or_empty(document.get("delta"), self._sender), pieces)
        elif kind == "content_block_start":
            self._begin(index, object_or_empty(document.get("content_block"), self._sender), pieces)
        elif kind == "message_start":
            self._start(object_or_empty(document.get("message"), self._sender))
        elif kind == "message_delta":
            self._stop(object_or_empty(document.get("delta"), self._sender), document)
        elif kind == "message_stop":
            self.done = True
        elif kind == "error" or document.get("error") is not None:
            raise error_in_reply(self._sender, document)
        elif not isinstance(kind, str):
            raise malformed_reply(self._sender, "an event without a type")

    def read_whole(self, body: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        document = parse(body, self._sender)
        if document.get("type") == "error" or document.get("error") is not None:
            raise error_in_reply(self._sender, document)
        for index, block in enumerate(rows(document.get("content"), self._sender)):
            self._begin(index, block, pieces)
        self._model = label(document.get("model"))
        self._id = label(document.get("id"))
        self._stop(document, document)
        if self._finish is None:
            raise malformed_reply(self._sender, "a reply without a stop reason")
        self.done = True

    def end(self) -> End:
        """See `http.ReplyReader`."""
        if self._finish is None or not self.done:
            raise fault(WorkerTruncated, self._sender, "no message_stop")
        finish = self._calls.finish(self._finish)
        return End(
            finish,
            self._usage(),
            self._model,
            refused=finish == "content_filter",
            stop_sequence=self._stop_sequence,
            id=self._id,
        )

    def keepsake(self) -> dict[str, Any]:
        """See `http.ReplyReader`: blocks of thinking, as they must be given back."""
        if len(self._calls) and self._thoughts:
            return {"blocks": list(self._thoughts.values())}
        return {}

    def _begin(self, index: object, block: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Take a block, whole or still empty."""
        kind = block.get("type")
        if kind == "text":
            self._say(block, pieces)
        elif kind == "tool_use":
            tool_input = object_or_empty(block.get("input"), self._sender)
            arguments = document.arguments_text(tool_input, self._sender) if tool_input else ""
            name, id_ = words(block.get("name"), self._sender), words(block.get("id"), self._sender)
            self._calls.take(index, id_, name, arguments, pieces)
        elif kind in ("thinking", "redacted_thinking"):
            self._thoughts[index] = dict(block)

    def _more(self, index: object, delta: Mapping[str, Any], pieces: list[Piece]) -> None:
        """Take more of a block."""
        kind = delta.get("type")
        if kind == "text_delta":
            self._say(delta, pieces)
        elif kind == "input_json_delta" and index in self._calls:  # a tool of the server's own is no call
            self._calls.take(index, "", "", words(delta.get("partial_json"), self._sender), pieces)
        elif kind == "thinking_delta":
            self._think(index, "thinking", delta)
        elif kind == "signature_delta":
            self._think(index, "signature", delta)

    def _think(self, index: object, field: str, delta: Mapping[str, Any]) -> None:
        """Add to a field of a block of thinking; a delta of a block that never began is dropped."""
        thought = self._thoughts.get(index)
        if thought:
            thought[field] = words(thought.get(field), self._sender) + words(delta.get(field), self._sender)

    def _say(self, block: Mapping[str, Any], pieces: list[Piece]) -> None:
        text = words(block.get("text"), self._sender)
        if text:
            pieces.append(TextDelta(text))

    def _start(self, message: Mapping[str, Any]) -> None:
        self._model = label(message.get("model")) or self._model
        self._id = label(message.get("id")) or self._id
        counts = message.get("usage")
        if isinstance(counts, dict):
            # The output counted so far; only `message_delta` has the final one.
            self._counts |= {name: value for name, value in counts.items() if name.endswith("input_tokens")}

    def _stop(self, delta: Mapping[str, Any], document: Mapping[str, Any]) -> None:
        reason = words(delta.get("stop_reason"), self._sender)
        if reason:
            self._finish = self._finish or FINISH.get(reason, "length")
        self._stop_sequence = words(delta.get("stop_sequence"), self._sender) or self._stop_sequence
        counts = document.get("usage")
        if isinstance(counts, dict):
            for name, value in counts.items():
                if value or (value == 0 and name not in self._counts):  # some count the input at the start, and 0 here
                    self._counts[name] = value

    def _usage(self) -> Usage | None:
        """Return the usage in Baton's terms: what was read from the cache and written into it counts as input, too."""
        counts = self._counts
        cached_tokens = counts.get("cache_read_input_tokens", 0)
        cache_writes = counts.get("cache_creation_input_tokens", 0)
        uncached_count = count(counts.get("input_tokens"))
        cached_count = count(cached_tokens or 0)
        stored_count = count(cache_writes or 0)
        input_tokens = None
        if uncached_count is not None and cached_count is not None and stored_count is not None:
            input_tokens = uncached_count + cached_count + stored_count
        thinking = usage_detail(counts, "output_tokens_details", "thinking_tokens")
        return usage(input_tokens, counts.get("output_tokens"), cached_tokens, thinking, stored=cache_writes)
