"""OpenAI's `/v1/responses`: a document of output items, or semantic events that end with the whole document.

Source: the published reference of the endpoint and of its streaming events, and the official client's types.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from msgspec import Struct

from . import responses_rules
from .openai_wire import CREATED, OpenAIWire
from .record import ReceivedRequest
from .responses_rules import INCLUDES
from .rules import parse
from .script import Reply, Usage
from .wire import Frame, ProviderRefusal

_UNREADABLE = "We could not parse the JSON body of your request."
_COMPLETE = frozenset(("stop", "tool", "refusal"))
_REASONS = {"length": "max_output_tokens", "blocked": "content_filter"}


class ResponsesWire(Struct, frozen=True):
    """Bearer key; headers and errors are those of chat completions."""

    keys: frozenset[str] | None
    name: str = "responses"
    newline: str = "\n"

    @property
    def _shared(self) -> OpenAIWire:
        return OpenAIWire(self.keys)

    @property
    def stream_headers(self) -> dict[str, str]:
        """Return the headers of a streamed answer."""
        return self._shared.stream_headers

    def headers(self, status: int) -> dict[str, str]:
        """Return the headers of every answer."""
        return self._shared.headers(status)

    def accept(self, received: ReceivedRequest) -> None:
        """Key, JSON, then the rules."""
        self._shared.check_key(received.header("authorization"))
        body = parse(received, _UNREADABLE)
        received.model = str(body.get("model", ""))
        responses_rules.check(body)
        received.streaming = bool(body.get("stream"))

    def error(self, refused: ProviderRefusal) -> dict[str, Any]:
        """OpenAI's error object."""
        return self._shared.error(refused)

    def error_event(self, refused: ProviderRefusal) -> Frame:
        """Return the event `error`, which has its fields at the top."""
        error = self.error(refused)["error"]
        return self._event("end", "error", **{name: error[name] for name in ("code", "message", "param")})

    def document(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        """Return a `response`."""
        document = self._shell(received, reply)
        is_complete = reply.finish in _COMPLETE
        usage = self._usage(reply)
        return {
            **document,
            "status": "completed" if is_complete else "incomplete",
            "incomplete_details": None if is_complete else {"reason": _REASONS.get(reply.finish, reply.finish)},
            "output": [item for item, _ in self._items(received, reply)],
            **({} if usage is None else {"usage": usage}),
        }

    def frames(self, received: ReceivedRequest, reply: Reply) -> Iterator[Frame]:
        """`response.created`, each item from `added` to `done`, and the whole response."""
        response = {**self._shell(received, reply), "status": "in_progress", "output": [], "usage": None}
        yield self._event("open", "response.created", response=response)
        yield self._event("open", "response.in_progress", response=response)
        items = list(self._items(received, reply))
        for place, (item, content) in enumerate(items):
            empty = {name: [] if isinstance(value, list) else value for name, value in item.items()}
            if item["type"] == "function_call":
                empty["arguments"] = ""
            shared = {"output_index": place}
            yield self._event("open", "response.output_item.added", item={**empty, "status": "in_progress"}, **shared)
            for kind, fields in content:
                yield self._event(
                    "delta", f"response.{kind}.delta", item_id=item["id"], obfuscation="aZ9", **shared, **fields
                )
            kind = "close" if place == len(items) - 1 else "open"
            if item["type"] == "message":
                text = {"item_id": item["id"], "content_index": 0, "part": item["content"][0], **shared}
                yield self._event(kind, "response.content_part.done", **text)
            yield self._event(kind, "response.output_item.done", item=item, **shared)
        whole = self.document(received, reply)
        yield self._event("end", f"response.{whole['status']}", response=whole)

    def _items(
        self, received: ReceivedRequest, reply: Reply
    ) -> Iterator[tuple[dict[str, Any], Iterator[tuple[str, Any]]]]:
        """Each output item with its deltas as (kind, fields)."""
        if reply.reasoning:
            sealed = {"encrypted_content": "c3R1Yg=="} if received.json.get("include") else {}
            summary = [{"type": "summary_text", "text": "".join(reply.reasoning)}]
            yield {"id": "rs_stub", "type": "reasoning", "summary": summary, **sealed}, iter(())
        if reply.refusal is not None or reply.chunks:
            part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            if reply.refusal is not None:
                part = {"type": "refusal", "refusal": reply.refusal}
            elif not reply.endless:
                part["text"] = reply.text
                part["logprobs"] = [token for chunk in reply.chunks for token in _logprobs(received.json, reply, chunk)]
            message = {"id": "msg_stub", "type": "message", "role": "assistant", "status": "completed"}
            yield {**message, "phase": "final_answer", "content": [part]}, self._content_events(received, reply)
        for i, call in enumerate(reply.tool_calls):
            call_fields = {
                "call_id": call.id or f"call_{id(received):x}_{i}",
                "name": call.name,
                "arguments": call.arguments,
            }
            item = {"id": f"fc_stub{i}", "type": "function_call", "status": "completed", **call_fields}
            yield item, self._arguments(call.arguments)

    def _content_events(self, received: ReceivedRequest, reply: Reply) -> Iterator[tuple[str, Any]]:
        if reply.refusal is not None:
            for word in re.findall(r"\S+\s*", reply.refusal):
                yield "refusal", {"content_index": 0, "delta": word}
            return
        for piece in reply.pieces():
            yield (
                "output_text",
                {"content_index": 0, "delta": piece, "logprobs": _logprobs(received.json, reply, piece)},
            )

    def _arguments(self, arguments: str) -> Iterator[tuple[str, Any]]:
        half = max(1, len(arguments) // 2)
        for part in (arguments[:half], arguments[half:]):
            yield "function_call_arguments", {"delta": part}

    def _event(self, kind: Any, name: str, **fields: Any) -> Frame:
        return Frame(kind, json.dumps({"type": name, "sequence_number": 0, **fields}), name)

    def _shell(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        body = received.json
        model = reply.model or received.model
        head = {"id": "resp_stub", "object": "response", "created_at": CREATED, "model": model, "error": None}
        return {**head, "incomplete_details": None, "store": body.get("store", True), "tools": body.get("tools", [])}

    def _usage(self, reply: Reply) -> dict[str, Any] | None:
        if reply.raw_usage is not None or reply.usage is None:
            return reply.raw_usage
        use: Usage = reply.usage
        return {
            "input_tokens": use.input,
            "input_tokens_details": {"cached_tokens": use.cached, "cache_write_tokens": use.cache_write},
            "output_tokens": use.output,
            "output_tokens_details": {"reasoning_tokens": use.reasoning},
            "total_tokens": use.input + use.output,
        }


def _logprobs(body: dict[str, Any], reply: Reply, token: str) -> list[dict[str, Any]]:
    """The token, if they were asked for, and as many likeliest ones; the API sends no bytes of those in a stream."""
    if INCLUDES[1] not in (body.get("include") or ()):
        return []
    others = [(f" alternative{i}", reply.logprob - 2 - i) for i in range((body.get("top_logprobs") or 0) - 1)]
    listed = [(token, reply.logprob), *others] if body.get("top_logprobs") else []
    top = [{"token": name, "logprob": value} for name, value in listed]
    return [{"token": token, "logprob": reply.logprob, "top_logprobs": top}]
