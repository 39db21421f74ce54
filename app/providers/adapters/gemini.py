"""Gemini's generateContent.

Source: the v1beta reference (`GenerateContentResponse`, `FinishReason`, `UsageMetadata`). A stream has no terminal
event: its marker is the candidate's `finishReason`, or the prompt's `blockReason`, and then the body ends. Thoughts are
no part of the answer, but are billed as output in addition to `candidatesTokenCount`. Log-probabilities are not asked
for: most models answer 400 to that. Tool calls come whole, and without ids from most models; their `thoughtSignature`
is stored and sent back. For calls that another model made, Gemini 3 and later take `skip_thought_signature_validator`
in its place ("Thought signatures"). Option: `ignore`.
"""

import re
from collections.abc import AsyncIterator, Mapping
from typing import Any
from urllib.parse import quote

import orjson

from app.core.message.chat import End, Finish, Part, Piece, Sampling, Text, TextDelta, Tool, Toolbox, Usage
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import WorkerMalformed, WorkerTruncated
from app.providers import document, options
from app.providers.document import StreamedCalls, count, label, object_or_empty, parse, rows, usage, words
from app.providers.faults import error_in_reply, fault, malformed_reply
from app.providers.http import Endpoint, ProviderRequest, exchange
from app.providers.protocol import Request
from app.providers.turns import PlacedCall, ProviderData, Result, TurnPart, inline, turns

BASE_URL = "https://generativelanguage.googleapis.com"
FINISH: dict[str, Finish] = {
    "STOP": "stop",
    "MAX_TOKENS": "length",
    "SAFETY": "content_filter",
    "RECITATION": "content_filter",
    "LANGUAGE": "content_filter",
    "BLOCKLIST": "content_filter",
    "PROHIBITED_CONTENT": "content_filter",
    "SPII": "content_filter",
    "IMAGE_SAFETY": "content_filter",
    "IMAGE_PROHIBITED_CONTENT": "content_filter",
    "IMAGE_RECITATION": "content_filter",
}
"""Any other reason ends the answer as `length`: it may be incomplete, but it was paid for and is not thrown away."""
UNREADABLE = frozenset(
    [
        "MALFORMED_FUNCTION_CALL",
        "UNEXPECTED_TOOL_CALL",
        "TOO_MANY_TOOL_CALLS",
        "MALFORMED_RESPONSE",
        "MISSING_THOUGHT_SIGNATURE",
    ]
)
"""Finish reasons which mean that Gemini could not parse the model's output."""
SEEDS = 2**31
"""The API takes a signed integer of 32 bits; callers' seeds may have 64."""
UNSIGNED = "skip_thought_signature_validator"
UNSPECIFIED = frozenset(("", "FINISH_REASON_UNSPECIFIED", "BLOCK_REASON_UNSPECIFIED"))
MEDIA = {"png": "image/png", "jpg": "image/jpeg", "jpeg": "image/jpeg", "webp": "image/webp", "gif": "image/gif"}


class GeminiProvider:
    """Gemini's endpoint."""

    def __init__(self, spec: ProviderSpec, key: str | None, proxy_credentials: str | None = None) -> None:
        """Open nothing yet; raises ConfigInvalid. An empty `base_url` means Google's own; a version may end it.
        At Vertex it ends with `publishers/google`."""
        options.check(spec)
        base_url = (spec.base_url or BASE_URL).rstrip("/")
        if spec.auth != "google" and not base_url.endswith(("/v1", "/v1beta")):
            base_url += "/v1beta"
        secrets = {"x-goog-api-key": key} if key else {}
        self._endpoint = Endpoint(spec, base_url, {}, secrets, proxy_credentials)
        self._spec = spec
        self.unsupported = options.list_unsupported(spec)

    def render(self, request: Request) -> bytes:
        """Return the exact request body; see `protocol.Provider`. The model and the verb are in the URL."""
        conversation = turns(request.messages)
        needs_signatures = re.search(r"gemini-[12]\b", request.worker.model) is None
        body: dict[str, Any] = {}
        if conversation.instructions:
            body["systemInstruction"] = {"parts": [{"text": text} for text in conversation.instructions]}
        body["contents"] = []
        for is_user, pieces in conversation.turns:
            parts: list[dict[str, Any]] = []
            for piece in pieces:
                parts += _parts(piece, needs_signatures)
            body["contents"].append({"role": "user" if is_user else "model", "parts": parts})
        config = _sampling(request.sampling, self.unsupported | request.worker.drops)
        spec = self._spec.for_call(request.worker.model, with_tools=bool(request.toolbox.tools))
        if request.form is not None and spec.structured:
            config["responseMimeType"] = "application/json"
            if request.form.schema is not None:
                config["responseJsonSchema"] = request.form.schema
        body["generationConfig"] = config
        body |= _tools(request.toolbox)
        return orjson.dumps(body, default=dict)

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send `body` and yield what comes back; see `protocol.Provider`."""
        sender = f"{request.worker.name} at {self._spec.name}"
        streams = self._spec.streams and request.live
        verb = "streamGenerateContent?alt=sse" if streams else "generateContent"
        path = f"/{_resource(request.worker.model)}:{verb}"
        names = {_tool_name(tool.name): tool.name for tool in request.toolbox.tools}
        provider_request = ProviderRequest(path, body, deadlines, sender, streams=streams, headers=request.headers)
        return exchange(self._endpoint, provider_request, Candidate(sender, names))

    async def close(self) -> None:
        """Close all connections."""
        await self._endpoint.close()


def _resource(model: str) -> str:
    """Return the resource of a model: `gemini-x`, or a resource name like `tunedModels/x`, quoted."""
    resource = model if "/" in model else f"models/{model}"
    return quote(resource, safe="/")


def _parts(part_of_turn: TurnPart, needs_signatures: bool) -> list[dict[str, Any]]:
    """Return the parts of one piece of a turn; with `needs_signatures` the model wants a signature with the first call
    of a turn."""
    if isinstance(part_of_turn, ProviderData):
        return []
    if isinstance(part_of_turn, PlacedCall):
        return [_call(part_of_turn, needs_signatures)]
    if isinstance(part_of_turn, Result):
        return _result(part_of_turn)
    return [_part(part_of_turn)]


def _call(made_call: PlacedCall, needs_signatures: bool) -> dict[str, Any]:
    call = {
        "name": _tool_name(made_call.call.name),
        "args": document.arguments_object(made_call.call.arguments),
    }
    part: dict[str, Any] = {"functionCall": call | _id_field(made_call)}
    signature = _keepsake_entry(made_call, "signatures")
    if not signature and needs_signatures and made_call.place == 0 and not made_call.keepsake:
        signature = UNSIGNED
    if signature:
        part["thoughtSignature"] = signature
    return part


def _result(result: Result) -> list[dict[str, Any]]:
    """Return the result of a call: its text, then its images, each as a part of its own."""
    text = "".join(part.text for part in result.parts if isinstance(part, Text))
    response = {"name": _tool_name(result.called.call.name), **_id_field(result.called)}
    response["response"] = {"error" if result.failed else "output": text}
    images = [_part(part) for part in result.parts if not isinstance(part, Text)]
    return [{"functionResponse": response}, *images]


def _id_field(made_call: PlacedCall) -> dict[str, Any]:
    id_ = _keepsake_entry(made_call, "ids")
    if id_:
        return {"id": id_}
    return {}


def _keepsake_entry(made_call: PlacedCall, field: str) -> str | None:
    """Return this call's entry of a list in the keepsake, if it has one."""
    values = made_call.keepsake.get(field, ())
    if made_call.place >= len(values):
        return None
    entry: str = values[made_call.place]
    return entry


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"text": part.text}
    data = inline(part)
    if data is not None:
        return {"inlineData": {"mimeType": data[0], "data": data[1]}}
    extension = part.url.partition("?")[0].rpartition(".")[2].lower()
    file_data: dict[str, Any] = {}
    if extension in MEDIA:
        file_data["mimeType"] = MEDIA[extension]
    file_data["fileUri"] = part.url
    return {"fileData": file_data}


def _sampling(sampling: Sampling, unsupported: frozenset[str]) -> dict[str, Any]:
    values = {
        "max_tokens": ("maxOutputTokens", sampling.max_tokens),
        "temperature": ("temperature", sampling.temperature),
        "top_p": ("topP", sampling.top_p),
        "stop": ("stopSequences", sampling.stop or None),
        "seed": ("seed", _seed(sampling.seed)),
        "presence_penalty": ("presencePenalty", sampling.presence_penalty),
        "frequency_penalty": ("frequencyPenalty", sampling.frequency_penalty),
    }
    config: dict[str, Any] = {}
    for name, (gemini_name, value) in values.items():
        if value is not None and name not in unsupported:
            config[gemini_name] = value
    return config


def _seed(seed: int | None) -> int | None:
    if seed is None or -SEEDS <= seed < SEEDS:
        return seed
    return seed % SEEDS


def _tools(toolbox: Toolbox) -> dict[str, Any]:
    """Return `tools` and `toolConfig`; the format cannot ask for one call at a time."""
    if not toolbox.tools:
        return {}
    body: dict[str, Any] = {"tools": [{"functionDeclarations": [_declaration(tool) for tool in toolbox.tools]}]}
    if toolbox.choice == "auto":
        return body
    config: dict[str, Any] = {"mode": "NONE" if toolbox.choice == "none" else "ANY"}
    if toolbox.choice == "named":
        config["allowedFunctionNames"] = [_tool_name(toolbox.named)]
    return body | {"toolConfig": {"functionCallingConfig": config}}


def _declaration(tool: Tool) -> dict[str, Any]:
    declaration: dict[str, Any] = {"name": _tool_name(tool.name), "description": tool.description or tool.name}
    if tool.parameters is not None:
        declaration["parametersJsonSchema"] = tool.parameters
    return declaration


def _tool_name(name: str) -> str:
    """Return a name as Gemini accepts it: it begins with a letter or an underscore."""
    if re.match(r"[A-Za-z_]", name):
        return name
    return f"_{name}"


class Candidate:
    """One reply as it arrives: `GenerateContentResponse`s, one or many; only candidate 0 is read."""

    __slots__ = ("_calls", "_finish", "_id", "_ids", "_model", "_names", "_sender", "_signatures", "_usage", "done")

    def __init__(self, sender: str, names: Mapping[str, str] | None = None) -> None:
        """`names` maps the tools' names as they were sent to the caller's names."""
        self._sender = sender
        self._names = names or {}
        self._ids: list[str] = []
        self._signatures: list[str] = []
        self._finish: Finish | None = None
        self._model: str | None = None
        self._id: str | None = None
        self._usage: Usage | None = None
        self._calls = StreamedCalls(sender)
        self.done = False

    @property
    def complete(self) -> bool:
        """See `http.ReplyReader`."""
        return self._finish is not None

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        if data:
            self._take(parse(data, self._sender), pieces)

    def read_whole(self, body: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        self._take(parse(body, self._sender), pieces)
        if self._finish is None:
            raise malformed_reply(self._sender, "a reply without a finish reason")

    def end(self) -> End:
        """See `http.ReplyReader`."""
        if self._finish is None:
            raise fault(WorkerTruncated, self._sender, "no finish reason")
        finish = self._calls.finish(self._finish)
        return End(finish, self._usage, self._model, refused=finish == "content_filter", id=self._id)

    def keepsake(self) -> dict[str, Any]:
        """See `http.ReplyReader`: the signature and the id of each call."""
        if not len(self._calls):
            return {}
        return {"signatures": self._signatures, "ids": self._ids}

    def _take(self, document: dict[str, Any], pieces: list[Piece]) -> None:
        if document.get("error") is not None:
            raise error_in_reply(self._sender, document)
        if not document.keys() & {"candidates", "promptFeedback", "usageMetadata"}:
            raise malformed_reply(self._sender, "no candidates")
        self._model = label(document.get("modelVersion")) or self._model
        self._id = label(document.get("responseId")) or self._id
        counts = document.get("usageMetadata")
        if isinstance(counts, dict):
            self._usage = _usage(counts) or self._usage
        feedback = object_or_empty(document.get("promptFeedback"), self._sender)
        if words(feedback.get("blockReason"), self._sender) not in UNSPECIFIED:
            self._finish = "content_filter"
        for candidate in rows(document.get("candidates"), self._sender):
            if not candidate.get("index"):
                self._choose(candidate, pieces)

    def _choose(self, candidate: dict[str, Any], pieces: list[Piece]) -> None:
        for part in rows(object_or_empty(candidate.get("content"), self._sender).get("parts"), self._sender):
            if part.get("functionCall") is not None:
                self._call(part, pieces)
            text = words(part.get("text"), self._sender)
            if text and not part.get("thought"):
                pieces.append(TextDelta(text))
        reason = words(candidate.get("finishReason"), self._sender)
        if reason in UNREADABLE:
            raise fault(WorkerMalformed, self._sender, "the model's output could not be read")
        if reason not in UNSPECIFIED:
            self._finish = self._finish or FINISH.get(reason, "length")

    def _call(self, part: dict[str, Any], pieces: list[Piece]) -> None:
        call = object_or_empty(part["functionCall"], self._sender)
        name = words(call.get("name"), self._sender)
        arguments = document.arguments_text(object_or_empty(call.get("args"), self._sender), self._sender)
        self._ids.append(words(call.get("id"), self._sender))
        self._signatures.append(words(part.get("thoughtSignature"), self._sender))
        self._calls.take(len(self._calls), self._ids[-1], self._names.get(name, name), arguments, pieces)


def _usage(counts: dict[str, Any]) -> Usage | None:
    """Return the usage: candidates and thoughts are both output; the API leaves out a count of zero."""
    thoughts = count(counts.get("thoughtsTokenCount", 0))
    output_tokens = count(counts.get("candidatesTokenCount", 0))
    out = None
    if thoughts is not None and output_tokens is not None:
        out = thoughts + output_tokens
    return usage(counts.get("promptTokenCount"), out, counts.get("cachedContentTokenCount"), thoughts)
