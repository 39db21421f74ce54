"""OpenAI's `/v1/chat/completions`, and the same as vLLM serves it: lenient fields, no key, reasoning shown.

Source: openai-openapi 2.3.0 (shapes), the official client's types, and observed streams (the first frame has the role,
every frame `usage: null` once usage was asked for, the usage frame has no choices, `[DONE]` ends).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from . import openai_rules
from .record import ReceivedRequest
from .rules import parse
from .script import Reply, Usage
from .wire import Frame, ProviderRefusal

CREATED = 1_760_000_000
_FINISH = {"refusal": "stop", "tool": "tool_calls", "blocked": "content_filter"}
_TYPES = {
    401: "invalid_request_error",
    403: "invalid_request_error",
    404: "invalid_request_error",
    429: "rate_limit_error",
}
_CODES = {401: "invalid_api_key", 404: "model_not_found", 429: "rate_limit_exceeded"}
_WORDS = {
    429: "Rate limit reached for requests. Please try again later.",
    500: "The server had an error while processing your request. Sorry about that!",
    503: "The engine is currently overloaded, please try again later.",
}


class OpenAIWire(Struct, frozen=True):
    """Bearer key; `strict` is OpenAI itself, otherwise a compatible server."""

    keys: frozenset[str] | None
    strict: bool = True
    name: str = "openai"
    newline: str = "\n"

    @property
    def stream_headers(self) -> dict[str, str]:
        """Return the headers of a streamed answer."""
        return {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

    def headers(self, status: int) -> dict[str, str]:
        """Return the headers of every answer."""
        limits = {
            "x-ratelimit-limit-requests": "10000",
            "x-ratelimit-remaining-requests": "0" if status == 429 else "9999",
        }
        return {"x-request-id": "req_stub", "openai-version": "2020-10-01", "openai-processing-ms": "7", **limits}

    def accept(self, received: ReceivedRequest) -> None:
        """Key, JSON, then the rules."""
        self.check_key(received.header("authorization"))
        if "application/json" not in (received.header("content-type") or ""):
            raise ProviderRefusal(
                415 if self.strict else 400, "Unsupported Media Type: 'Content-Type' must be application/json."
            )
        body = parse(
            received,
            "We could not parse the JSON body of your request. (HINT: This likely means you "
            "aren't using your "
            "HTTP library correctly. The OpenAI API expects a JSON payload, but what was sent "
            "was not valid "
            "JSON.)",
        )
        received.model = str(body.get("model", ""))
        openai_rules.check(body, self.strict)
        received.streaming = bool(body.get("stream"))

    def check_key(self, header: str | None) -> None:
        """Raise ProviderRefusal unless the header has a key that is known."""
        if self.keys is None and not self.strict:
            return
        scheme, _, key = (header or "").partition(" ")
        if scheme.lower() != "bearer" or not key:
            raise ProviderRefusal(
                401,
                "You didn't provide an API key. You need to provide your API key in an Authorization "
                "header using "
                "Bearer auth (i.e. Authorization: Bearer YOUR_KEY).",
                "none",
            )
        if self.keys is not None and key not in self.keys:
            raise ProviderRefusal(
                401,
                f"Incorrect API key provided: {key[:3]}****{key[-4:]}. You can find your API key at "
                "https://platform.openai.com/account/api-keys.",
            )

    def error(self, refused: ProviderRefusal) -> dict[str, Any]:
        """OpenAI's error object."""
        status = refused.status
        kind = _TYPES.get(status, "server_error" if status >= 500 else "invalid_request_error")
        message = refused.message or _WORDS.get(status, "The server had an error.")
        code = None if refused.code == "none" else refused.code or _CODES.get(status)
        return {"error": {"message": message, "type": kind, "param": refused.param, "code": code}}

    def error_event(self, refused: ProviderRefusal) -> Frame:
        """Return the error object as an event of the stream."""
        return Frame("end", json.dumps(self.error(refused)))

    def document(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        """Return a `chat.completion`."""
        body = received.json
        content = None if reply.refusal or (reply.tool_calls and not reply.chunks) else reply.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": reply.refusal, "annotations": []}
        if reply.reasoning and not self.strict:
            message["reasoning_content"] = message["reasoning"] = "".join(reply.reasoning)
        if reply.tool_calls:
            message["tool_calls"] = [self._call(received, reply, i, True) for i in range(len(reply.tool_calls))]
        said = reply.chunks if reply.refusal is None else _words(reply.refusal)
        log = self._logprobs(body, reply, list(said))
        choice = {"message": message, "logprobs": log, "finish_reason": _FINISH.get(reply.finish, reply.finish)}
        choice |= {} if reply.stop_sequence is None else {"stop_reason": reply.stop_sequence}
        choices = [{"index": i, **choice} for i in range(body.get("n") or 1)]
        usage = self._usage(reply)
        return {
            **self._head(received, reply, "chat.completion"),
            "choices": choices,
            **({} if usage is None else {"usage": usage}),
            "service_tier": "default",
        }

    def frames(self, received: ReceivedRequest, reply: Reply) -> Iterator[Frame]:
        """The event stream of `chat.completion.chunk`s."""
        body = received.json
        options = body.get("stream_options") or {}
        shared: dict[str, Any] = {**self._head(received, reply, "chat.completion.chunk"), "service_tier": "default"}
        if options.get("include_usage"):
            shared["usage"] = None
        if self.strict and options.get("include_obfuscation", True):
            shared["obfuscation"] = "aZ9"
        for index in range(body.get("n") or 1):
            yield self._chunk("open", shared, index, {"role": "assistant", "content": "", "refusal": None})
            yield from self._content(received, reply, shared, index)
            yield self._close(reply, shared, index)
        usage = self._usage(reply)
        if options.get("include_usage") and usage is not None:
            yield Frame("close", json.dumps({**shared, "choices": [], "usage": usage}))
        yield Frame("end", "[DONE]")

    def _close(self, reply: Reply, shared: dict[str, Any], index: int) -> Frame:
        choice = {"index": index, "delta": {}, "logprobs": None}
        choice["finish_reason"] = _FINISH.get(reply.finish, reply.finish)
        choice |= {} if reply.stop_sequence is None else {"stop_reason": reply.stop_sequence}
        return Frame("close", json.dumps({**shared, "choices": [choice]}))

    def _content(self, received: ReceivedRequest, reply: Reply, shared: dict[str, Any], index: int) -> Iterator[Frame]:
        for piece in reply.reasoning if not self.strict else ():
            yield self._chunk("open", shared, index, {"reasoning_content": piece, "reasoning": piece})
        if reply.refusal is not None:
            for word in _words(reply.refusal):
                log = self._logprobs(received.json, reply, [word])
                yield self._chunk("delta", shared, index, {"refusal": word}, logprobs=log)
            return
        for piece in reply.pieces():
            log = self._logprobs(received.json, reply, [piece])
            yield self._chunk("delta", shared, index, {"content": piece}, logprobs=log)
        for i, call in enumerate(reply.tool_calls):
            yield self._chunk("open", shared, index, {"tool_calls": [self._call(received, reply, i, False)]})
            half = max(1, len(call.arguments) // 2)
            for part in (call.arguments[:half], call.arguments[half:]):
                delta = {"tool_calls": [{"index": i, "function": {"arguments": part}}]}
                yield self._chunk("delta", shared, index, delta)

    def _chunk(
        self,
        kind: Any,
        shared: dict[str, Any],
        index: int,
        delta: dict[str, Any],
        logprobs: Any = None,
    ) -> Frame:
        choice = {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": None}
        return Frame(kind, json.dumps({**shared, "choices": [choice]}))

    def _head(self, received: ReceivedRequest, reply: Reply, kind: str) -> dict[str, Any]:
        model = reply.model or received.model
        return {
            "id": "chatcmpl-stub",
            "object": kind,
            "created": CREATED,
            "model": model,
            "system_fingerprint": "fp_stub",
        }

    def _call(self, received: ReceivedRequest, reply: Reply, i: int, whole: bool) -> dict[str, Any]:
        call = reply.tool_calls[i]
        function = {"name": call.name, "arguments": call.arguments if whole else ""}
        call_fields = {"id": call.id or f"call_{id(received):x}_{i}", "type": "function", "function": function}
        return call_fields if whole else {"index": i, **call_fields}

    def _logprobs(self, body: dict[str, Any], reply: Reply, tokens: list[str]) -> dict[str, Any] | None:
        if not body.get("logprobs"):
            return None

        def entry(token: str, value: float) -> dict[str, Any]:
            return {"token": token, "logprob": value, "bytes": list(token.encode(errors="surrogatepass"))}

        top = body.get("top_logprobs") or 0
        rest = [(f" alternative{i}", reply.logprob - 2 - i) for i in range(top - 1)]
        chosen = []
        for token in tokens:
            candidates = [(token, reply.logprob), *rest] if top else []
            top_logprobs = [entry(*candidate) for candidate in candidates]
            chosen.append({**entry(token, reply.logprob), "top_logprobs": top_logprobs})
        if reply.refusal is not None:
            return {"content": None, "refusal": chosen}
        return {"content": chosen, "refusal": None}

    def _usage(self, reply: Reply) -> dict[str, Any] | None:
        if reply.raw_usage is not None or reply.usage is None:
            return reply.raw_usage
        use: Usage = reply.usage
        return {
            "prompt_tokens": use.input,
            "completion_tokens": use.output,
            "total_tokens": use.input + use.output,
            "prompt_tokens_details": {
                "cached_tokens": use.cached,
                "cache_write_tokens": use.cache_write,
                "audio_tokens": 0,
            },
            "completion_tokens_details": {
                "reasoning_tokens": use.reasoning,
                "audio_tokens": 0,
                "accepted_prediction_tokens": 0,
                "rejected_prediction_tokens": 0,
            },
        }


def _words(text: str) -> list[str]:
    return re.findall(r"\S+\s*", text)
