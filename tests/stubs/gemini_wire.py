"""Gemini's `models/{model}:generateContent` and `:streamGenerateContent?alt=sse`: CRLF, no terminal event.

Source: the v1beta reference and the official client's types. `promptTokenCount` includes cached tokens;
`candidatesTokenCount` leaves out thoughts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from . import gemini_rules
from .record import ReceivedRequest
from .rules import parse
from .script import Reply
from .wire import Frame, ProviderRefusal

_FINISH = {
    "stop": "STOP",
    "length": "MAX_TOKENS",
    "tool": "STOP",
    "tool_calls": "STOP",
    "refusal": "SAFETY",
    "content_filter": "SAFETY",
}
_STATUS = {
    400: "INVALID_ARGUMENT",
    401: "UNAUTHENTICATED",
    403: "PERMISSION_DENIED",
    404: "NOT_FOUND",
    409: "ABORTED",
    429: "RESOURCE_EXHAUSTED",
    500: "INTERNAL",
    503: "UNAVAILABLE",
    504: "DEADLINE_EXCEEDED",
}
_WORDS = {
    429: "You exceeded your current quota, please check your plan and billing details.",
    500: "An internal error has occurred. Please retry or report in "
    "https://developers.generativeai.google/guide/troubleshooting",
    503: "The model is overloaded. Please try again later.",
}
_UNREGISTERED = (
    "Method doesn't allow unregistered callers (callers without established identity). Please use API Key or other "
    "form of "
    "API consumer identity to call this API."
)
_BAD_KEY = {
    "@type": "type.googleapis.com/google.rpc.ErrorInfo",
    "reason": "API_KEY_INVALID",
    "domain": "googleapis.com",
    "metadata": {"service": "generativelanguage.googleapis.com"},
}


class GeminiWire(Struct, frozen=True):
    """The key comes in `x-goog-api-key`, or in the query as `key`."""

    keys: frozenset[str] | None
    name: str = "gemini"
    newline: str = "\r\n"

    @property
    def stream_headers(self) -> dict[str, str]:
        """Return the headers of a streamed answer."""
        return {"Content-Type": "text/event-stream", "Content-Disposition": "attachment"}

    def headers(self, status: int) -> dict[str, str]:
        """Return the headers of every answer."""
        return {"Server": "scaffolding on HTTPServer2", "Server-Timing": "gfet4t7; dur=7", "Vary": "Origin"}

    def accept(self, received: ReceivedRequest) -> None:
        """Key, JSON, then the rules; the model and the verb are in the path."""
        received.model, _, verb = received.path.rsplit("/", 1)[-1].partition(":")
        received.streaming = verb == "streamGenerateContent"
        key = received.header("x-goog-api-key") or received.query.get("key")
        if not key:
            raise ProviderRefusal(403, _UNREGISTERED)
        if self.keys is not None and key not in self.keys:
            raise ProviderRefusal(400, "API key not valid. Please pass a valid API key.", details=[_BAD_KEY])
        if verb not in ("generateContent", "streamGenerateContent"):
            raise ProviderRefusal(
                404, f"models/{received.model} is not found for API version v1beta, or is not supported for {verb}."
            )
        body = gemini_rules.camel(parse(received, "Invalid JSON payload received."))
        gemini_rules.check(body)
        if received.model.startswith("gemini-3"):
            gemini_rules.check_signatures(body["contents"])
        if received.model.startswith(("gemini-1", "gemini-2")):
            gemini_rules.check_form_beside_tools(body)

    def error(self, refused: ProviderRefusal) -> dict[str, Any]:
        """google.rpc.Status in its JSON form."""
        status = refused.status
        message = refused.message or _WORDS.get(status, "The service is currently unavailable.")
        error = {"code": status, "message": message, "status": _STATUS.get(status, "UNAVAILABLE")}
        return {"error": {**error, "details": refused.details} if refused.details else error}

    def error_event(self, refused: ProviderRefusal) -> Frame:
        """Return the status as an event of the stream."""
        return Frame("end", json.dumps(self.error(refused)))

    def document(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        """Return a GenerateContentResponse."""
        if reply.finish == "blocked":
            return self._blocked_reply(received, reply)
        parts: list[dict[str, Any]] = []
        if reply.reasoning:
            parts.append({"text": "".join(reply.reasoning), "thought": True})
        if reply.chunks and reply.refusal is None:
            parts.append({"text": reply.text})
        return self._response(received, reply, parts + self._calls(reply), True)

    def frames(self, received: ReceivedRequest, reply: Reply) -> Iterator[Frame]:
        """A response per event; the last one has the finish reason. Without `alt=sse` it is one JSON array."""
        if reply.finish == "blocked":
            yield Frame("close", json.dumps(self._blocked_reply(received, reply)))
            return
        for piece in reply.reasoning:
            part = {"text": piece, "thought": True}
            yield Frame("open", json.dumps(self._response(received, reply, [part], False)))
        if reply.refusal is None:
            for piece in reply.pieces():
                yield Frame("delta", json.dumps(self._response(received, reply, [{"text": piece}], False)))
        for part in self._calls(reply):
            yield Frame("delta", json.dumps(self._response(received, reply, [part], False)))
        last = [] if reply.refusal is not None else [{"text": ""}]
        yield Frame("close", json.dumps(self._response(received, reply, last, True)))

    def _calls(self, reply: Reply) -> list[dict[str, Any]]:
        calls = []
        for call in reply.tool_calls:
            try:
                args = json.loads(call.arguments)
            except ValueError:
                args = {}
            function = {"name": call.name, "args": args, **({"id": call.id} if call.id else {})}
            calls.append({"functionCall": function, "thoughtSignature": "c3R1Yg=="})
        return calls

    def _response(
        self, received: ReceivedRequest, reply: Reply, parts: list[dict[str, Any]], last: bool
    ) -> dict[str, Any]:
        candidate: dict[str, Any] = {"index": 0}
        if parts:
            candidate["content"] = {"parts": parts, "role": "model"}
        if last:
            finish = "SAFETY" if reply.refusal is not None else _FINISH.get(reply.finish, reply.finish)
            candidate["finishReason"] = finish
            if finish == "SAFETY":
                rating = {"category": "HARM_CATEGORY_DANGEROUS_CONTENT", "probability": "HIGH", "blocked": True}
                candidate["safetyRatings"] = [rating]
        return {"candidates": [candidate], **self._tail(received, reply, last)}

    def _blocked_reply(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        return {"promptFeedback": {"blockReason": "PROHIBITED_CONTENT"}, **self._tail(received, reply, False)}

    def _tail(self, received: ReceivedRequest, reply: Reply, last: bool) -> dict[str, Any]:
        tail = {"modelVersion": reply.model or received.model, "responseId": "stubresponse"}
        if reply.raw_usage is not None:
            return {"usageMetadata": reply.raw_usage, **tail}
        use = reply.usage
        if use is None:
            return tail
        usage: dict[str, Any] = {"promptTokenCount": use.input}
        written = use.output - use.reasoning if last else 0
        if last:
            usage["candidatesTokenCount"] = written
        usage["totalTokenCount"] = use.input + written + use.reasoning
        usage["promptTokensDetails"] = [{"modality": "TEXT", "tokenCount": use.input}]
        if use.cached:
            usage["cachedContentTokenCount"] = use.cached
            usage["cacheTokensDetails"] = [{"modality": "TEXT", "tokenCount": use.cached}]
        if use.reasoning:
            usage["thoughtsTokenCount"] = use.reasoning
        return {"usageMetadata": usage, **tail}
