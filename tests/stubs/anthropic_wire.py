"""Anthropic's `/v1/messages`: named events, cumulative usage, errors inside a 200.

Source: the official client's types. `input_tokens` leaves out cached and cache-writing tokens; `output_tokens` includes
thinking.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from . import anthropic_rules
from .record import ReceivedRequest
from .rules import parse
from .script import Reply, ToolCall
from .wire import Frame, ProviderRefusal

VERSIONS = ("2026-10-21", "2023-06-01", "2023-01-01")
REQUEST_ID = "req_011stub"
_STOP = {
    "stop": "end_turn",
    "length": "max_tokens",
    "tool": "tool_use",
    "tool_calls": "tool_use",
    "blocked": "refusal",
    "content_filter": "refusal",
}
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    402: "billing_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    529: "overloaded_error",
}
_WORDS = {500: "Internal server error", 529: "Overloaded", 429: "This request would exceed your account's rate limit."}


class AnthropicWire(Struct, frozen=True):
    """The key in `x-api-key` or as a bearer token (either does), and `anthropic-version`."""

    keys: frozenset[str] | None
    name: str = "anthropic"
    newline: str = "\n"

    @property
    def stream_headers(self) -> dict[str, str]:
        """Return the headers of a streamed answer."""
        return {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}

    def headers(self, status: int) -> dict[str, str]:
        """Return the headers of every answer."""
        retry = {"x-should-retry": "true"} if status in (429, 529) or status >= 500 else {}
        return {"request-id": REQUEST_ID, "anthropic-organization-id": "org-stub", **retry}

    def accept(self, received: ReceivedRequest) -> None:
        """Key, version, JSON, then the rules."""
        scheme, _, bearer = (received.header("authorization") or "").partition(" ")
        key = received.header("x-api-key") or (bearer if scheme.lower() == "bearer" else "")
        version = received.header("anthropic-version")
        if not key:
            raise ProviderRefusal(401, "x-api-key header is required")
        if self.keys is not None and key not in self.keys:
            raise ProviderRefusal(401, "invalid x-api-key")
        if not version:
            raise ProviderRefusal(400, "anthropic-version: header is required")
        if version not in VERSIONS:
            raise ProviderRefusal(400, f'anthropic-version: "{version}" is not a valid version')
        if "application/json" not in (received.header("content-type") or ""):
            raise ProviderRefusal(400, "content-type: must be application/json")
        body = parse(received, "The request body is not valid JSON")
        received.model = str(body.get("model", ""))
        anthropic_rules.check(body, version)
        received.streaming = bool(body.get("stream"))

    def error(self, refused: ProviderRefusal) -> dict[str, Any]:
        """Anthropic's error object."""
        kind = _TYPES.get(refused.status, "api_error" if refused.status >= 500 else "invalid_request_error")
        message = refused.message or _WORDS.get(refused.status, "Internal server error")
        return {"type": "error", "error": {"type": kind, "message": message}, "request_id": REQUEST_ID}

    def error_event(self, refused: ProviderRefusal) -> Frame:
        """Return the event `error`."""
        return Frame("end", json.dumps(self.error(refused)), "error")

    def document(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        """Return a `message`."""
        content: list[dict[str, Any]] = []
        if reply.reasoning:
            content.append({"type": "thinking", "thinking": "".join(reply.reasoning), "signature": "c3R1Yg=="})
        if reply.chunks and reply.refusal is None:
            content.append({"type": "text", "text": reply.text})
        for i, call in enumerate(reply.tool_calls):
            try:
                arguments = json.loads(call.arguments)
            except ValueError:
                arguments = {}
            content.append({**_tool_use(received, call, i), "input": arguments})
        usage = self._usage(reply)
        return {
            **_shell(received, reply),
            "content": content,
            **_stop(reply),
            **({} if usage is None else {"usage": usage}),
        }

    def frames(self, received: ReceivedRequest, reply: Reply) -> Iterator[Frame]:
        """`message_start`, blocks, `message_delta`, `message_stop`."""
        usage = self._usage(reply)
        usage_so_far = (
            {} if reply.raw_usage is not None or reply.usage is None else {"output_tokens": min(1, reply.usage.output)}
        )
        first = {} if usage is None else {"usage": {**usage, **usage_so_far}}
        empty: dict[str, Any] = {"content": [], "stop_reason": None, "stop_sequence": None}
        yield _event("open", "message_start", message={**_shell(received, reply), **empty, **first})
        yield from self._blocks(received, reply)
        last = {} if usage is None else {"usage": {name: usage[name] for name in usage if name != "service_tier"}}
        yield _event("close", "message_delta", delta=_stop(reply), **last)
        yield _event("end", "message_stop")

    def _blocks(self, received: ReceivedRequest, reply: Reply) -> Iterator[Frame]:
        index = 0
        if reply.reasoning:
            yield _event(
                "open",
                "content_block_start",
                index=0,
                content_block={"type": "thinking", "thinking": "", "signature": ""},
            )
            for piece in reply.reasoning:
                yield _delta("open", 0, "thinking_delta", thinking=piece)
            yield _delta("open", 0, "signature_delta", signature="c3R1Yg==")
            yield _event("open", "content_block_stop", index=0)
            index = 1
        if reply.chunks and reply.refusal is None:
            yield _event("open", "content_block_start", index=index, content_block={"type": "text", "text": ""})
            yield _event("open", "ping")
            for piece in reply.pieces():
                yield _delta("delta", index, "text_delta", text=piece)
            yield _event("open", "content_block_stop", index=index)
            index += 1
        for i, call in enumerate(reply.tool_calls):
            block = {**_tool_use(received, call, i), "input": {}}
            yield _event("open", "content_block_start", index=index, content_block=block)
            half = len(call.arguments) // 2
            for part in ("", call.arguments[:half], call.arguments[half:]):
                yield _delta("delta", index, "input_json_delta", partial_json=part)
            yield _event("open", "content_block_stop", index=index)
            index += 1

    def _usage(self, reply: Reply) -> dict[str, Any] | None:
        if reply.raw_usage is not None or reply.usage is None:
            return reply.raw_usage
        use = reply.usage
        details = {"output_tokens_details": {"thinking_tokens": use.reasoning}} if use.reasoning else {}
        return {
            "input_tokens": use.input - use.cached - use.cache_write,
            "cache_creation_input_tokens": use.cache_write,
            "cache_read_input_tokens": use.cached,
            "output_tokens": use.output,
            "service_tier": "standard",
            **details,
        }


def _event(kind: Any, name: str, **fields: Any) -> Frame:
    return Frame(kind, json.dumps({"type": name, **fields}), name)


def _delta(kind: Any, index: int, name: str, **fields: Any) -> Frame:
    return _event(kind, "content_block_delta", index=index, delta={"type": name, **fields})


def _tool_use(received: ReceivedRequest, call: ToolCall, i: int) -> dict[str, Any]:
    return {"type": "tool_use", "id": call.id or f"toolu_{id(received):x}_{i}", "name": call.name}


def _shell(received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
    return {"id": "msg_01stub", "type": "message", "role": "assistant", "model": reply.model or received.model}


def _stop(reply: Reply) -> dict[str, Any]:
    reason = "refusal" if reply.refusal is not None else _STOP.get(reply.finish, reply.finish)
    if reply.stop_sequence is not None:
        reason = "stop_sequence"
    stop: dict[str, Any] = {"stop_reason": reason, "stop_sequence": reply.stop_sequence}
    if reason == "refusal":
        stop["stop_details"] = {"type": "refusal", "category": None, "explanation": reply.refusal}
    return stop
