"""OpenAI's chat completions, and the many servers that speak it (vLLM, DeepSeek, OpenRouter, Mistral, xAI, ...).

Source: the openai-openapi 2.3.0 description and the documentation of those servers. The terminal marker is a choice's
`finish_reason`: OpenAI ends with `[DONE]`, but some compatible servers just close, and by then the answer is whole.
`[DONE]` without a `finish_reason` says nothing about the answer, so that counts as truncated. Only choice 0 is read
(`n` is never sent). Reasoning is no part of the answer; of a turn with tool calls it is stored and sent back under the
names under which it came, which DeepSeek and OpenRouter ask for. Tools return text here: images in a result follow it
in a user's message.

Options: `max_tokens_field` (`max_completion_tokens` on api.openai.com, else `max_tokens`), `stream_options` (`omit` for
servers that refuse it; then there may be no usage), `developer_role` (`keep` on api.openai.com, else `system`),
`reasoning` (`drop` for servers that refuse it back), `tool_ids` (`short` for Mistral, which knows nine letters and
digits only), `ignore`.
"""

import hashlib
import re
from collections.abc import AsyncIterator, Iterable, Mapping
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace

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
    position,
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
FINISH: dict[str, Finish] = {
    "stop": "stop",
    "eos": "stop",
    "eos_token": "stop",
    "stop_sequence": "stop",
    "length": "length",
    "model_length": "length",
    "content_filter": "content_filter",
    "sensitive": "content_filter",
    "tool_calls": "tool_calls",
    "function_call": "tool_calls",
}
"""Any other reason ends the answer as `length`: it may be incomplete, but it was paid for and is not thrown away."""
BROKEN_OFF = frozenset(("abort", "error", "insufficient_system_resource", "network_error"))
"""Finish reasons of vLLM, of OpenRouter and Mistral, of DeepSeek, and of Zhipu, which mean that the server aborted."""
LONGEST_ID = 40
PICTURES = "Images that the tools returned:"
FILES = "Files that the tools returned:"
RECEIVED = "I have received the results."
BASE_62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


class OpenAIProvider:
    """One OpenAI-compatible endpoint."""

    def __init__(self, spec: ProviderSpec, key: str | None, proxy_credentials: str | None = None) -> None:
        """Open nothing yet; raises ConfigInvalid. An empty `base_url` means OpenAI's own."""
        options.check(spec)
        secrets = key_headers(spec, key, "authorization", "Bearer ")
        self._endpoint = Endpoint(spec, spec.base_url or BASE_URL, {}, secrets, proxy_credentials)
        self._spec = spec
        is_openai = self._endpoint.base.host == "api.openai.com"
        is_mistral = self._endpoint.base.host == "api.mistral.ai"
        self._takes_any_schema = not (is_openai or self._endpoint.base.host.endswith(".openai.azure.com"))
        """False where schemas have to be plain objects at their root."""
        self._max_tokens_field = "max_completion_tokens" if is_openai else "max_tokens"
        developer_role = "keep" if is_openai else "system"
        tool_ids = "short" if is_mistral else "keep"
        self._max_tokens_field = spec.options.get("max_tokens_field", self._max_tokens_field)
        self._messages = MessageFormat(
            keeps_developer=spec.options.get("developer_role", developer_role) == "keep",
            returns_reasoning=spec.options.get("reasoning") != "drop",
            needs_short_ids=spec.options.get("tool_ids", tool_ids) == "short",
            answers_results=is_mistral,
        )
        self.unsupported = options.list_unsupported(spec)

    def render(self, request: Request) -> bytes:
        """Return the exact request body; see `protocol.Provider`."""
        spec = self._spec
        body: dict[str, Any] = {"model": request.worker.model, "messages": self._messages.render(request.messages)}
        body |= _sampling(request.sampling, self._max_tokens_field, self.unsupported | request.worker.drops)
        toolbox = request.toolbox
        if not self._takes_any_schema:
            toolbox = replace(toolbox, tools=tuple(map(_with_plain_schema, toolbox.tools)))
        body |= _tools(toolbox, strict=spec.structured)
        if request.form is not None and spec.structured and (request.form.is_object or self._takes_any_schema):
            body["response_format"] = _response_format(request.form)
        if request.logprobs is not None:
            body |= {"logprobs": True, "top_logprobs": min(request.logprobs, MOST_LOGPROBS)}
        if spec.streams and request.live:
            body["stream"] = True
            if spec.options.get("stream_options") != "omit":
                body["stream_options"] = {"include_usage": True}
        return orjson.dumps(body, default=dict)

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send `body` and yield what comes back; see `protocol.Provider`."""
        sender = f"{request.worker.name} at {self._spec.name}"
        streams = self._spec.streams and request.live
        provider_request = ProviderRequest(
            "/chat/completions", body, deadlines, sender, streams=streams, headers=request.headers
        )
        return exchange(self._endpoint, provider_request, Completion(sender))

    async def close(self) -> None:
        """Close all connections."""
        await self._endpoint.close()


def _tools(toolbox: Toolbox, *, strict: bool) -> dict[str, Any]:
    """Return `tools`, `tool_choice` and `parallel_tool_calls`; `strict` says that the endpoint constrains decoding.

    OpenAI refuses a strict tool that has optional arguments, so such a tool is offered without `strict`.
    """
    if not toolbox.tools:
        return {}
    tools = [{"type": "function", "function": _function(tool, strict)} for tool in toolbox.tools]
    body: dict[str, Any] = {"tools": tools}
    if toolbox.choice == "named":
        body["tool_choice"] = {"type": "function", "function": {"name": toolbox.named}}
    elif toolbox.choice != "auto":
        body["tool_choice"] = toolbox.choice
    if toolbox.parallel:
        return body
    return body | {"parallel_tool_calls": False}


def _with_plain_schema(tool: Tool) -> Tool:
    if tool.parameters is None:
        return tool
    return replace(tool, parameters=for_openai(tool.parameters))


def _function(tool: Tool, strict: bool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description:
        function["description"] = tool.description
    if tool.parameters is not None:
        function["parameters"] = tool.parameters
    if strict and tool.strict and is_closed(tool.parameters or {}):
        function["strict"] = True
    return function


def _response_format(form: Form) -> dict[str, Any]:
    if form.schema is None:
        return {"type": "json_object"}
    schema: dict[str, Any] = {"name": form.name}
    if form.description:
        schema["description"] = form.description
    schema |= {"strict": form.strict, "schema": form.schema}
    return {"type": "json_schema", "json_schema": schema}


def _sampling(sampling: Sampling, max_tokens_field: str, unsupported: frozenset[str]) -> dict[str, Any]:
    values = {
        max_tokens_field: sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "stop": sampling.stop or None,
        "seed": sampling.seed,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "logit_bias": dict(sampling.logit_bias) or None,
    }
    return {name: value for name, value in values.items() if value is not None and name not in unsupported}


class MessageFormat(Struct, frozen=True):
    """The variant of messages that an endpoint accepts."""

    keeps_developer: bool
    """True if it knows the role `developer`; if not, that role is sent as `system`."""
    returns_reasoning: bool
    """True if reasoning that came with tool calls is sent back."""
    needs_short_ids: bool
    """True if ids of tool calls must be nine letters and digits."""
    answers_results: bool = False
    """True if only the assistant may speak behind the results of tools, as at Mistral."""

    def render(self, messages: Iterable[Message]) -> list[dict[str, Any]]:
        """Return the messages in order; images of tool results follow the results, because those hold text only."""
        rendered: list[dict[str, Any]] = []
        files: list[Part] = []
        for message in messages:
            if message.role != "tool" and files:
                rendered.append(self._files(files))
                files = []
            rendered.append(self._message(message))
            if message.call_id:
                files += [part for part in message.parts if not isinstance(part, Text)]
        if files:
            rendered.append(self._files(files))
        if self.answers_results:
            return _with_answers_to_results(rendered)
        return rendered

    def _files(self, files: list[Part]) -> dict[str, Any]:
        """Return a user's message with the images and documents that tools returned."""
        introduction = PICTURES
        if any(isinstance(part, Document) for part in files):
            introduction = FILES
        return self._message(Message("user", (Text(introduction), *files)))

    def _message(self, message: Message) -> dict[str, Any]:
        if message.call_id:
            return {"role": "tool", "tool_call_id": self._id(message.call_id), "content": message.text}
        role: str = message.role
        if role == "developer" and not self.keeps_developer:
            role = "system"
        if role == "tool":
            role = "user"  # A result without the id of its call can only be sent as text.
        rendered: dict[str, Any] = {"role": role, "content": _message_content(message)}
        if message.name:
            rendered["name"] = message.name
        if message.calls:
            rendered |= self._calls(message)
        return rendered

    def _calls(self, message: Message) -> dict[str, Any]:
        calls = [
            {"id": self._id(call.id), "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.calls
        ]
        if not self.returns_reasoning or message.keepsake is None:
            return {"tool_calls": calls}
        for call, extra in zip(calls, message.keepsake.get("extra_content", ()), strict=False):
            if extra:
                call["extra_content"] = extra
        return {"tool_calls": calls, **message.keepsake.get("message", {})}

    def _id(self, id_: str) -> str:
        """Return the id, or one derived from it where the endpoint would refuse it; deterministic."""
        if self.needs_short_ids:
            if re.fullmatch("[A-Za-z0-9]{9}", id_):
                return id_
            return _digest(id_, 9)
        if len(id_) <= LONGEST_ID:
            return id_
        return f"call_{_digest(id_, 24)}"


def _with_answers_to_results(rendered: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the messages with an assistant's between the results of tools and what somebody else says next."""
    answered: list[dict[str, Any]] = []
    for message in rendered:
        if answered and answered[-1]["role"] == "tool" and message["role"] in ("system", "user"):
            answered.append({"role": "assistant", "content": RECEIVED})
        answered.append(message)
    return answered


def _digest(text: str, places: int) -> str:
    digest = hashlib.sha256(text.encode()).digest()[:places]
    return "".join(BASE_62[byte % 62] for byte in digest)


def _message_content(message: Message) -> str | list[dict[str, Any]] | None:
    """Return one text as a string, several parts as a list, and None for an assistant that only calls tools."""
    text = message.text
    if message.calls and not text:
        return None
    if len(message.parts) > 1 or not all(isinstance(part, Text) for part in message.parts):
        return [_part(part) for part in message.parts]
    return text


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, Text):
        return {"type": "text", "text": part.text}
    if isinstance(part, Document):
        return {"type": "file", "file": {"filename": part.name or DOCUMENT_NAME, "file_data": part.url}}
    image: dict[str, Any] = {"url": part.url}
    if part.detail:
        image["detail"] = part.detail
    return {"type": "image_url", "image_url": image}


class Completion:
    """One reply as it arrives: `chat.completion.chunk`s, or a whole `chat.completion`.

    A chunk is read here as far as it is well-formed, because there is one for each token; anything unusual in it goes
    to the readers of `document.py`, which refuse it or say what it means.
    """

    __slots__ = (
        "_calls",
        "_finish",
        "_id",
        "_model",
        "_reasoning",
        "_refused",
        "_sender",
        "_stop_sequence",
        "_usage",
        "done",
    )

    def __init__(self, sender: str) -> None:
        self._sender = sender
        self._calls = StreamedCalls(sender)
        self._reasoning = Reasoning()
        self._finish: Finish | None = None
        self._stop_sequence = ""
        self._usage: Usage | None = None
        self._model: str | None = None
        self._id: str | None = None
        self._refused = False
        self.done = False

    @property
    def complete(self) -> bool:
        """See `http.ReplyReader`."""
        return self._finish is not None

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        if data.strip() == b"[DONE]":
            self.done = True
        elif data:
            self._take(self._parse(data), "delta", pieces)

    def read_whole(self, body: bytes, pieces: list[Piece]) -> None:
        """See `http.ReplyReader`."""
        self._take(parse(body, self._sender), "message", pieces)
        if self._finish is None:
            raise malformed_reply(self._sender, "a reply without a finish reason")

    def end(self) -> End:
        """See `http.ReplyReader`."""
        if self._finish is None:
            raise fault(WorkerTruncated, self._sender, "no finish reason")
        finish = self._calls.finish(self._finish)
        refused = self._refused or finish == "content_filter"
        return End(finish, self._usage, self._model, refused, self._stop_sequence, self._id)

    def keepsake(self) -> dict[str, Any]:
        """See `http.ReplyReader`."""
        if not len(self._calls):
            return {}
        return self._reasoning.keepsake(len(self._calls))

    def _parse(self, data: bytes) -> dict[str, Any]:
        try:
            document = orjson.loads(data)
        except orjson.JSONDecodeError:
            document = None
        if isinstance(document, dict):
            return document
        return parse(data, self._sender)

    def _take(self, document: dict[str, Any], part: str, pieces: list[Piece]) -> None:
        if document.get("error") is not None or document.get("object") == "error":
            raise error_in_reply(self._sender, document)
        if "choices" not in document and "usage" not in document:
            raise malformed_reply(self._sender, "no choices")
        if document.get("usage") is not None:
            self._usage = _usage(document["usage"]) or self._usage
        model = document.get("model")
        if model != self._model:
            self._model = label(model) or self._model
        if self._id is None:
            self._id = label(document.get("id"))
        choices = document.get("choices")
        if not isinstance(choices, list):
            choices = rows(choices, self._sender)
        for choice in choices:
            if not isinstance(choice, dict):
                raise malformed_reply(self._sender, "a choice of the wrong type")
            index = choice.get("index")
            if not index or index == "0":  # some servers write it as a text
                self._choose(choice, part, pieces)

    def _choose(self, choice: dict[str, Any], part: str, pieces: list[Piece]) -> None:
        """Take what choice 0 adds: `part` names the field that has it, `delta` or `message`."""
        sender = self._sender
        message = choice.get(part)
        if not isinstance(message, dict):
            message = object_or_empty(message, sender)
        text = message.get("content")
        if not isinstance(text, str):
            text = _content(text, sender)
        if text:
            pieces.append(TextDelta(text))
        self._reasoning.take(message)
        calls = message.get("tool_calls")
        if calls is not None:
            for place, call in enumerate(rows(calls, sender)):
                self._call(call, place, pieces)
        refusal = message.get("refusal")
        if refusal is not None:
            self._refuse(words(refusal, sender), pieces)
        if choice.get("logprobs") is not None:
            logprobs = object_or_empty(choice["logprobs"], sender)
            pieces.extend(tokens(logprobs.get("content"), sender))
            pieces.extend(tokens(logprobs.get("refusal"), sender))
        reason = choice.get("finish_reason")
        if reason is not None:
            self._end_with(words(reason, sender), choice)
            stop_reason = choice.get("stop_reason")  # vLLM's own: the stop sequence, or the id of a token
            if isinstance(stop_reason, str):
                self._stop_sequence = stop_reason

    def _refuse(self, refusal: str, pieces: list[Piece]) -> None:
        if refusal:
            self._refused = True
            pieces.append(TextDelta(refusal, refusal=True))

    def _end_with(self, reason: str, choice: dict[str, Any]) -> None:
        if choice.get("error") is not None:  # OpenRouter's
            raise error_in_reply(self._sender, choice)
        if reason in BROKEN_OFF:
            raise fault(WorkerUnavailable, self._sender, "it aborted its answer")
        if reason:
            self._finish = self._finish or FINISH.get(reason, "length")

    def _call(self, call: dict[str, Any], place: int, pieces: list[Piece]) -> None:
        """Take more of one tool call; some servers leave out the index, and a whole reply has none."""
        sender = self._sender
        index = position(call.get("index"), sender)
        key = place if index is None else index
        function = object_or_empty(call.get("function"), sender)
        id_, name = call.get("id"), words(function.get("name"), sender)
        if type(id_) is int:  # of Text Generation Inference before 2.1
            id_ = str(id_)
        arguments = document.arguments_text(function.get("arguments"), sender)
        number = self._calls.take(key, words(id_, sender), name, arguments, pieces)
        if number is not None:
            self._reasoning.extra(number, call.get("extra_content"))


def _content(value: object, sender: str) -> str:
    """Return text, or the text parts of a list, as Mistral streams it together with its reasoning."""
    if not isinstance(value, list):
        return words(value, sender)
    texts: list[str] = []
    for part in rows(value, sender):
        if part.get("type") == "text":
            texts.append(words(part.get("text"), sender))
    return "".join(texts)


def _usage(value: object) -> Usage | None:
    """Return OpenAI's totals; cached tokens have other names at DeepSeek and Moonshot.

    Where `total` shows that reasoning was left out of the completion (xAI), it is added.
    """
    if not isinstance(value, dict):
        return None
    prompt, completion = value.get("prompt_tokens"), value.get("completion_tokens")
    reasoning = usage_detail(value, "completion_tokens_details", "reasoning_tokens")
    cached = usage_detail(value, "prompt_tokens_details", "cached_tokens")
    if cached is None:
        cached = value.get("prompt_cache_hit_tokens")
    if cached is None:
        cached = value.get("cached_tokens")
    stored = usage_detail(value, "prompt_tokens_details", "cache_write_tokens")
    with_reasoning = usage(prompt, _sum(completion, reasoning), cached, reasoning, stored)
    if with_reasoning is not None and reasoning and value.get("total_tokens") == with_reasoning.total:
        return with_reasoning
    return usage(prompt, completion, cached, reasoning, stored)


def _sum(first: object, other: object) -> int | None:
    if isinstance(first, int) and isinstance(other, int):
        return first + other
    return None


class Reasoning:
    """Reasoning and signatures of a reply, which its server wants back with the turn."""

    __slots__ = ("_detail_texts", "_details", "_extras", "_texts")

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._details: list[dict[str, Any]] = []
        self._detail_texts: dict[tuple[int, str], list[str]] = {}
        self._extras: dict[int, Any] = {}

    def take(self, message: Mapping[str, Any]) -> None:
        """Add the reasoning of a delta or of a whole message."""
        for name in ("reasoning_content", "reasoning"):
            text = message.get(name)
            if isinstance(text, str) and text:
                self._texts.setdefault(name, []).append(text)
        details = message.get("reasoning_details")
        if not isinstance(details, list):
            return
        for detail in details:
            if isinstance(detail, dict):
                self._detail(detail)

    def extra(self, place: int, extra: object) -> None:
        """Add the extra content of one tool call, such as Google's signatures."""
        if extra:
            self._extras[place] = extra

    def keepsake(self, calls: int) -> dict[str, Any]:
        """Return all of it, empty if nothing came. `reasoning_details` replace `reasoning`: they hold more."""
        fields: dict[str, Any] = {}
        for (place, name), texts in self._detail_texts.items():
            self._details[place][name] = "".join(texts)
        if self._details:
            fields["message"] = {"reasoning_details": self._details}
        elif self._texts:
            name, texts = next(iter(self._texts.items()))
            fields["message"] = {name: "".join(texts)}
        if self._extras:
            fields["extra_content"] = [self._extras.get(place) for place in range(calls)]
        return fields

    def _detail(self, detail: dict[str, Any]) -> None:
        """Add a piece of a detail: its pieces follow each other, its texts grow, its other fields come once."""
        last = self._details[-1] if self._details else {}
        is_same = last.get("type") == detail.get("type") and last.get("index") == detail.get("index")
        if not last or not is_same or "data" in detail:
            self._details.append(dict(detail))
        for name, value in detail.items():
            if name in ("text", "summary") and isinstance(value, str):
                self._detail_texts.setdefault((len(self._details) - 1, name), []).append(value)
            elif value is not None:
                self._details[-1][name] = value
