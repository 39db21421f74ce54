"""AWS's binary event streams, in which Bedrock sends what others send as server-sent events.

Source: the Smithy specification `application/vnd.amazon.eventstream`, read by botocore, and the reference of
InvokeModelWithResponseStream: the payload of an event `chunk` has one event of the model's own format in base64. An
exception inside the stream is given on as an error event of Anthropic's.
"""

import base64
import binascii
import struct
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import orjson

from app.providers.faults import malformed_reply
from app.providers.http import EVENT_BYTES, STREAM_BYTES

EXCEPTIONS: Mapping[str, str] = {
    "throttlingException": "rate_limit_error",
    "validationException": "invalid_request_error",
    "modelTimeoutException": "timeout_error",
    "serviceUnavailableException": "overloaded_error",
}
"""Anthropic's error type for each exception of a stream; any other one is an `api_error`."""


class MessageReader:
    """Takes the bytes of each read, cut anywhere, and returns the events that they complete, as `http.EventReader`."""

    def __init__(self, sender: str) -> None:
        """`sender` is named in errors."""
        self._sender = sender
        library = import_module("botocore.eventstream")
        self._buffer: Any = library.EventStreamBuffer()
        self._faults = (library.ParserError, KeyError, UnicodeDecodeError, struct.error)
        """The errors that the library raises for malformed bytes. It raises a `KeyError` for a header of an unknown
        type, a `UnicodeDecodeError` for one that is not UTF-8, and a `struct.error` for one that is cut off."""
        self._total = 0
        self._held = 0
        """Bytes since the last complete message."""

    def feed(self, read: bytes) -> list[bytes]:
        """Return each completed event, in order; raises WorkerMalformed for what is no such stream, or too long."""
        self._total += len(read)
        self._held += len(read)
        if self._total > STREAM_BYTES or self._held > EVENT_BYTES + len(read):
            raise malformed_reply(self._sender, "a stream or an event that is too long")
        self._buffer.add_data(read)
        events: list[bytes] = []
        try:
            for message in self._buffer:
                self._held = 0
                events += self._event(message.headers, message.payload)
        except self._faults:
            raise malformed_reply(self._sender, "no event stream") from None
        return events

    def _event(self, headers: Mapping[str, Any], payload: bytes) -> list[bytes]:
        if headers.get(":message-type") != "event":
            name = str(headers.get(":exception-type") or headers.get(":error-code") or "")
            kind = EXCEPTIONS.get(name, "api_error")
            return [orjson.dumps({"type": "error", "error": {"type": kind, "message": _message(payload)}})]
        if headers.get(":event-type") != "chunk":
            return []
        try:
            return [base64.b64decode(orjson.loads(payload)["bytes"], validate=True)]
        except (orjson.JSONDecodeError, binascii.Error, KeyError, TypeError, ValueError):
            raise malformed_reply(self._sender, "a chunk without an event") from None


def _message(payload: bytes) -> str:
    try:
        return str(orjson.loads(payload)["message"])
    except (orjson.JSONDecodeError, KeyError, TypeError):
        return ""
