"""HTTP connections: uvicorn's own refusals in OpenAI's shape, and two bounds on the head of a request.

A request's head must come within `HEAD_SECONDS` and `HEAD_BYTES`; uvicorn bounds neither. A head that comes in one
packet, as nearly all do, costs nothing more.
"""

import asyncio
import select
from collections.abc import Callable
from functools import partial
from typing import Any, Final, cast

import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from app.gateway.http import fault
from app.gateway.http.context import GatewayContext
from app.gateway.http.request_log import write_unreadable

Refused = Callable[[int, str], str]
"""Called with the status and the code of each refusal; returns the id of the request."""
HEAD_BYTES: Final = 64 << 10
HEAD_SECONDS: Final = 30.0
LINGER_SECONDS: Final = 0.5
"""How long a connection without a request is kept open when the process no longer accepts connections."""


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds on the head of a request. What is ours has slots: attributes beyond thirty would cost each
    connection a dictionary of its own."""

    __slots__ = ("_head", "_in_head", "_late", "_refused", "_seconds")

    def __init__(self, *args: Any, refused: Refused, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = refused
        self._seconds = seconds
        self._in_head = False
        self._head = 0
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; one that sends nothing is disconnected after a while."""
        super().connection_made(cast(asyncio.Transport, _JoinedWrites(transport, self.loop)))
        self._late = self.loop.call_later(self._seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._came()

    def shutdown(self) -> None:
        """Close the connection behind its request, or, without one, once nothing has come for a while: a request that
        is on its way could not be answered any more, and a proxy must not send most requests a second time."""
        if self._is_idle:
            self.loop.call_later(LINGER_SECONDS, self._close_idle)
        else:
            super().shutdown()

    @property
    def _is_idle(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _close_idle(self) -> None:
        if self.transport.is_closing() or not self._is_idle:
            return
        if self._has_unread:
            self.loop.call_later(LINGER_SECONDS, self._close_idle)
        else:
            self.transport.close()

    @property
    def _has_unread(self) -> bool:
        """True if the event loop has yet to read something that has come, or that the client has left."""
        if (sock := self.transport.get_extra_info("socket")) is None:
            return False
        unread = select.poll()
        unread.register(sock.fileno(), select.POLLIN)
        return bool(unread.poll(0))

    def data_received(self, data: bytes) -> None:
        """Feed the parser; watch a head that has not arrived whole."""
        super().data_received(data)
        if not self._in_head:
            return self._came()
        self._head += len(data)
        if self._head > HEAD_BYTES:
            self._refuse(431, "The request's headers are too large.", "headers_too_large")
        elif self._late is None:
            self._late = self.loop.call_later(self._seconds, self._give_up)

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """The head has arrived whole."""
        self._in_head = False
        self._head = 0
        super().on_headers_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP."""
        self._refuse(400, "This is not a valid HTTP/1.1 request.", "invalid_http")

    def _came(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _give_up(self) -> None:
        self._late = None
        if self._in_head:
            self._refuse(408, "The request did not arrive in time; send it again.", "request_timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Write the reply, unless another one has begun, and close."""
        self._in_head = False
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
                self.transport.write(_reply(status, message, code, self._refused(status, code)))
            self.transport.close()


class _JoinedWrites:
    """A transport that sends the head of a reply together with what follows it. uvicorn writes the two one by one, and
    uvloop sends each write as it comes: a second packet is a system call more here, and wakes the reader twice."""

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""

    def write(self, data: bytes) -> None:
        """Send; a head waits for the next write, or for the next turn of the loop."""
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head + data)
        elif data.startswith(b"HTTP/1.1 "):
            self._head = data
            self._loop.call_soon(self._flush)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Close behind what was written."""
        self._flush()
        self._transport.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _flush(self) -> None:
        head, self._head = self._head, b""
        if head and not self._transport.is_closing():
            self._transport.write(head)


def connection(context: GatewayContext, seconds: float = HEAD_SECONDS) -> type[HttpToolsProtocol]:
    """Return the value of `http` for `uvicorn.Config`. A head must arrive within `seconds`."""

    def refused(status: int, code: str) -> str:
        request_id = context.name("req")
        write_unreadable(context.telemetry, request_id, status, code)
        return request_id

    return cast(type[HttpToolsProtocol], partial(Connection, refused=refused, seconds=seconds))


def _reply(status: int, message: str, code: str, request_id: str) -> bytes:
    body = orjson.dumps(fault.plain(message, code))
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
    return STATUS_LINE[status] + head.encode() + b"connection: close\r\n\r\n" + body
