"""HTTP connections and the traces that their requests leave: a line in the log, the metrics of requests, and a span.

uvicorn's own refusals are in OpenAI's shape, and the head of a request has two bounds: it must come within
`HEAD_SECONDS` and `HEAD_BYTES`; uvicorn bounds neither. A head that comes in one packet, as nearly all do, costs
nothing more.

`RequestMiddleware` makes a `RequestLog` and a span for each request and puts both into the request's scope, as
`baton.log` and `baton.span`; whoever learns something of the request notes it there. Nothing that a caller sends gets
into the line but the request's id, whose form is checked. The span follows OpenTelemetry's conventions for servers and
stands below the span that the caller names; the request's headers, query and body, and the addresses of callers, are
not in it.
"""

import asyncio
import select
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, cast

import httptools
import orjson
from opentelemetry.trace import SpanKind
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from app.core.pool.catalog import MILLION
from app.core.run.identifiers import NO_TRACE, trace_of_turn
from app.core.run.state import RunState
from app.engine.delivery.messages import FollowedRun, TurnEnd
from app.errors import BatonError, OverQuota
from app.gateway.http import fault
from app.gateway.http.context import GatewayContext
from app.network.tracing import Span, Tracing, read_trace_headers
from app.store.protocol import KeyRow
from app.telemetry import PROBES, Telemetry

Refused = Callable[[int, str], str]
"""Called with the status and the code of each refusal; returns the id of the request."""
HEAD_BYTES: Final = 64 << 10
"""The most bytes of the head of a request."""
HEAD_SECONDS: Final = 30.0
"""The time within which the head of a request must arrive."""
LINGER_SECONDS: Final = 0.5
"""How long a connection without a request is kept open when the process no longer accepts connections, and one whose
request was refused while the client may still be sending it."""


class Connection(HttpToolsProtocol):
    """uvicorn's, with bounds on the head of a request. What is ours has slots: attributes beyond thirty would cost each
    connection a dictionary of its own."""

    __slots__ = ("_deadline", "_has_refused", "_head_bytes", "_in_head", "_refused", "_seconds")

    def __init__(self, *args: Any, refused: Refused, seconds: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._refused = refused
        self._seconds = seconds
        self._in_head = False
        self._head_bytes = 0
        """The bytes that have come since the last ones of a body, or since the last request."""
        self._has_refused = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A client has connected; one that sends nothing is disconnected after a while."""
        super().connection_made(transport)
        self._deadline = self.loop.call_later(self._seconds, self._give_up)

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is gone."""
        super().connection_lost(exc)
        self._cancel_deadline()

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
        """Return True if the event loop has yet to read something that has come, or that the client has left."""
        sock = self.transport.get_extra_info("socket")
        if sock is None:
            return False
        unread = select.poll()
        unread.register(sock.fileno(), select.POLLIN)
        return bool(unread.poll(0))

    def data_received(self, data: bytes) -> None:
        """Feed the parser, unless the request was refused already; it may be refused by what it is fed."""
        if self._has_refused:
            return
        self._head_bytes += len(data)
        unread = data
        while unread:
            unread = self._feed(unread)
        self._watch_head()

    def _feed(self, data: bytes) -> bytes:
        """Feed the parser; return what it is to be fed next, which is nothing unless a request asks for an upgrade."""
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserError:
            self.send_400_response("")
        except httptools.HttpParserUpgrade as upgrade:
            if self.parser.get_method() != b"CONNECT":
                head = self._head_without_upgrade()
                # The parser reads nothing behind the last request of a connection, which this may be.
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                return head + data[upgrade.args[0] :]
            self.send_400_response("")
        return b""

    def _head_without_upgrade(self) -> bytes:
        """Return the head of a request without its wish for another protocol, which may be ignored (RFC 9110, 7.8).
        Java's client asks for HTTP/2 so with every request, and the parser would not read their bodies."""
        request_line = b"%s %s HTTP/%s\r\n" % (
            self.parser.get_method(),
            self.url,
            self.parser.get_http_version().encode(),
        )
        lines = [b"%s: %s\r\n" % header for header in self.headers if header[0] != b"upgrade"]
        return request_line + b"".join(lines) + b"\r\n"

    def _should_upgrade(self) -> bool:
        """Return True: uvicorn then leaves a request that asks for an upgrade to `_feed`, and begins none for it."""
        return True

    def _watch_head(self) -> None:
        """Bound the size of a head that has not arrived whole, or of fields behind a body, and the time of a head."""
        if self._has_refused:
            return
        if self._head_bytes > HEAD_BYTES:
            self._refuse(431, "The request's headers are too large.", "headers_too_large")
        elif not self._in_head:
            self._cancel_deadline()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(self._seconds, self._give_up)

    def on_message_begin(self) -> None:
        """The first byte of a request, which ends the time for which a connection is kept without one. More of the body
        of a request that has its reply does not."""
        self._unset_keepalive_if_required()
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head. One behind a chunked body is dropped (RFC 9110, 6.5.1): nothing in front looks at it."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head has arrived whole. Where this raises, the parser takes the request for no HTTP."""
        self._unset_keepalive_if_required()
        self._in_head = False
        self._head_bytes = 0
        hosts = [value for name, value in self.headers if name == b"host"]
        if len(hosts) != 1 and self.parser.get_http_version() == "1.1":
            raise ValueError("A request of HTTP/1.1 names one host (RFC 9112, 3.2).")
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            raise ValueError("The parser would give the body as it is in the other coding (RFC 9112, 6.1).")
        super().on_headers_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        """Begin a request. One of HTTP/1.0 gets no reply in chunks, which its client cannot read (RFC 9112, 6.1)."""
        if cycle.scope["http_version"] == "1.0":
            app = partial(_reply_without_chunks, app, cycle)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """More of the body."""
        self._head_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """The request has arrived whole. What follows in the same packet is not counted, because the parser does not
        say how much that is."""
        self._head_bytes = 0
        super().on_message_complete()

    def send_400_response(self, msg: str) -> None:
        """Refuse bytes that are not HTTP, or not what is read of it."""
        message = "This is not a valid HTTP/1.1 request, or its body has another transfer coding than chunked."
        self._refuse(400, message, "invalid_http")

    def _cancel_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _give_up(self) -> None:
        self._deadline = None
        if self._in_head:
            self._refuse(408, "The request did not arrive in time; send it again.", "request_timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str) -> None:
        """Write the reply, unless another one has begun, and close."""
        self._in_head = False
        if self.transport.is_closing():
            return
        is_answering = not self._is_idle
        reply_has_begun = is_answering and self.cycle.response_started
        if not reply_has_begun:
            self.transport.write(_reply(status, message, code, self._refused(status, code)))
        if reply_has_begun or self.pipeline:  # requests are being answered that cannot be kept from writing
            return self.transport.close()
        if is_answering:
            self.cycle.waiting_for_100_continue = False
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        self._close_behind_client()

    def _close_behind_client(self) -> None:
        """Close once the client has closed its side, or after `LINGER_SECONDS`. If the connection were closed over
        bytes that nobody has read, the operating system would reset it, and the client could miss the reply."""
        self._has_refused = True
        self._cancel_deadline()
        self._deadline = self.loop.call_later(LINGER_SECONDS, self.transport.close)
        if self.transport.can_write_eof():
            self.transport.write_eof()


async def _reply_without_chunks(
    app: Any, cycle: RequestResponseCycle, scope: Any, receive: Any, send: Callable[[Any], Awaitable[None]]
) -> None:
    """Serve a request whose reply is sent as it is, up to the end of the connection."""

    async def send_as_it_is(message: MutableMapping[str, Any]) -> None:
        cycle.chunked_encoding = False
        cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_as_it_is)


def connection(context: GatewayContext, seconds: float = HEAD_SECONDS) -> type[HttpToolsProtocol]:
    """Return the value of `http` for `uvicorn.Config`. A head must arrive within `seconds`."""

    def log_refusal(status: int, code: str) -> str:
        request_id = context.name("req")
        write_unreadable(context.telemetry, request_id, status, code)
        return request_id

    return cast(type[HttpToolsProtocol], partial(Connection, refused=log_refusal, seconds=seconds))


def _reply(status: int, message: str, code: str, request_id: str) -> bytes:
    body = orjson.dumps(fault.plain(message, code))
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nx-request-id: {request_id}\r\n"
    return STATUS_LINE[status] + head.encode() + b"connection: close\r\n\r\n" + body


# -- the traces of a request

UNMATCHED = "unmatched"
"""The route of a request for which there is none."""
METHOD_CLASSES = {"GET": "read", "HEAD": "read", "OPTIONS": "read"}
"""The classes of methods in metrics; all others are `write`."""
NAME_CHARS = 128
"""Characters of a name in a line."""
CLIENT_CLOSED = 499
OVERLOADED = 503
MOST_REASONS = 100
"""Most reasons of refusals that are counted apart. They are codes of our own errors, of which there are fewer."""
SPAN_KEY: Final = "baton.span"
"""The key of the span in the scope of a request."""
METHODS: Final = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
"""Methods that spans name; others are `_OTHER`, as the conventions have it."""


@dataclass(slots=True)
class RequestLog:
    """One HTTP request. `began` is the tick at which it came."""

    id: str
    began: float
    key: KeyRow | None = None
    """The API key, once it is known to be right."""
    run: str = ""
    """The run that the request has begun or follows."""
    tier: str = ""
    usd: int | None = None
    """Micro-dollars of the turn that the request has begun; None for every other request."""
    code: str = ""
    """The code of the error with which the request, or its stream, has ended."""
    limit: str = ""
    """The limit that the request has reached, of those that `OverQuota` names."""
    is_complete: bool = False
    """True once all of the reply was handed to the server."""
    is_disconnected: bool = False
    """True if the client has left before that."""

    def follow(self, run: FollowedRun) -> None:
        """Note the run of the request."""
        self.run, self.tier = run.run, run.state.admitted.tier

    def end(self, run: FollowedRun, turn_end: TurnEnd) -> None:
        """Note the end of its turn. Its cost belongs to the request that began the turn."""
        if not run.replayed:
            self.usd = turn_end.bill.turn_usd
        if turn_end.error is not None:
            self.fail(turn_end.error)

    def fail(self, error: BatonError) -> None:
        """Note an error."""
        self.code = error.public_code or ""
        self.limit = ""
        if isinstance(error, OverQuota):
            self.limit = error.limit

    def outcome(self, status: int) -> str:
        """`answered`, `failed` (an error, maybe inside of a stream), `disconnected` by the client, or `aborted`: this
        process was stopped before the reply was complete."""
        if self.is_disconnected:
            return "disconnected"
        if not self.is_complete:
            return "aborted"
        if self.code or status >= 400:
            return "failed"
        return "answered"

    def write(self, telemetry: Telemetry, scope: MutableMapping[str, Any], tick: float) -> None:
        """Count the request, and write its line. `tick` is the present one."""
        status, route, method = scope["baton.status"], route_of(scope), scope["method"]
        seconds = tick - self.began
        telemetry.count("baton_requests_total", route, str(status))
        kind = METHOD_CLASSES.get(method, "write")
        telemetry.observe("baton_request_seconds", seconds, route, kind, f"{status // 100}xx")
        count_refusal(telemetry, status, self.limit or self.code)
        fields: dict[str, object] = {
            "request": self.id,
            "method": method[:NAME_CHARS],
            "status": status,
            "outcome": self.outcome(status),
            "ms": round(seconds * 1000, 3),
        }
        if self.code:
            fields["code"] = self.code
        if self.key is not None:
            fields |= {"key": self.key.name[:NAME_CHARS], "tenant": self.key.tenant[:NAME_CHARS]}
        if self.run:
            fields |= {"run": self.run, "tier": self.tier}
        if self.usd is not None:
            fields["cost_usd"] = self.usd / MILLION
        telemetry.log_request(route, fields)


def write_unreadable(telemetry: Telemetry, request_id: str, status: int, code: str) -> None:
    """Count a request that the server has refused before it could be read, and write its line."""
    telemetry.count("baton_requests_total", UNMATCHED, str(status))
    count_refusal(telemetry, status, code)
    telemetry.log_request(UNMATCHED, {"request": request_id, "status": status, "outcome": "failed", "code": code})


def count_refusal(telemetry: Telemetry, status: int, reason: str) -> None:
    """Count a request that was refused, by its reason. One that has failed otherwise (500, 502, 504) was not."""
    if reason and (400 <= status < CLIENT_CLOSED or status == OVERLOADED):
        telemetry.count("baton_refusals_total", str(status), telemetry.bounded("reason", reason, MOST_REASONS))


def route_of(scope: MutableMapping[str, Any]) -> str:
    """Return the route's template, never the path itself: metric labels come from closed sets."""
    return getattr(scope.get("route"), "path", UNMATCHED)


# -- the span


def start_span(tracing: Tracing, scope: MutableMapping[str, Any]) -> Span:
    """Start the span of a request and put it into its scope."""
    if scope["path"] in PROBES:
        span = Span(NO_TRACE)
    elif not tracing.exports:
        span = Span(read_trace_headers(scope["headers"]))
    else:
        span = _server_span(tracing, scope)
    scope[SPAN_KEY] = span
    return span


def _server_span(tracing: Tracing, scope: MutableMapping[str, Any]) -> Span:
    method = _normalize_method(scope)
    attributes: dict[str, str | int] = {"http.request.method": method, "url.scheme": scope.get("scheme", "http")}
    if scope.get("http_version"):
        attributes["network.protocol.version"] = scope["http_version"]
    server = scope.get("server")
    if server is not None:
        host, port = server
        attributes["server.address"] = host
        if port is not None:
            attributes["server.port"] = port
    return tracing.start(method, read_trace_headers(scope["headers"]), attributes, kind=SpanKind.SERVER)


def end_span(span: Span, scope: MutableMapping[str, Any]) -> None:
    """End it with the route and the status of the reply; a status of 500 or more is an error."""
    if not span.is_recording:
        return span.end()
    status, route = scope["baton.status"], getattr(scope.get("route"), "path", None)
    attributes: dict[str, str | int] = {"baton.request": scope["baton.headers"][0][1].decode()}
    if route is not None:  # the path of a request that fits no route may be anything
        span.rename(f"{_normalize_method(scope)} {route}")
        attributes |= {"http.route": route, "url.path": scope["path"]}
    if status:
        attributes["http.response.status_code"] = status
    span.set(attributes)
    if 0 < status < 500:
        return span.end("")
    return span.end(str(status or 500))


def link_run(scope: MutableMapping[str, Any], state: RunState) -> None:
    """Note the run that a request began or follows, with a link if the run belongs to another trace."""
    span: Span = scope[SPAN_KEY]
    if span.is_recording:
        span.set({"baton.run": state.run})
        span.link(trace_of_turn(state.admitted.trace, state.turn.trace))


def _normalize_method(scope: MutableMapping[str, Any]) -> str:
    method: str = scope["method"]
    if method in METHODS:
        return method
    return "_OTHER"
