"""The API as the console asks it: in process, with the signed-in person's own credentials.

Each request goes through the whole application of the listener, so that keys, scopes, tenants, limits, errors and the
log of readers are those of any other client.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

import orjson
from msgspec import Struct
from msgspec.structs import replace
from starlette.types import ASGIApp, Message, Scope

DEADLINE_SECONDS: Final = 30.0
"""Longest time that a page waits for one reply of the API."""
EVENT_BYTES: Final = 8 << 20
"""The largest event of a stream; a longer one ends the stream."""
UNREAD_PARTS: Final = 64
"""Parts of a stream that wait for the console before the API waits too."""


class Session(Struct, frozen=True):
    """A signed-in person: the headers by which the API knows them."""

    headers: tuple[tuple[str, str], ...]
    via: str = "key"
    """`key`, or `oidc` for a person who has logged in at the OpenID provider."""
    seconds: float | None = None
    """The time that the session has left; None where the API alone knows it."""


class Event(Struct, frozen=True):
    """One event from a stream of the API; `data` is its text, which is JSON or `[DONE]`."""

    id: str
    name: str
    data: str


class ApiRequest(Struct, frozen=True):
    """A request of the console to the API."""

    method: str
    path: str
    """The path as in an address: its segments are quoted."""
    query: Mapping[str, object] = {}
    """The parameters. Those that are None or empty are left out; a list repeats its parameter."""
    body: object = None
    """The value that is sent as JSON; None sends an empty body."""
    headers: Mapping[str, str] = {}
    """Headers besides those of every request, with underscores for hyphens."""


class ApiError(Exception):
    """A refusal of the API, with its status and the error object of its body."""

    def __init__(self, status: int, body: Mapping[str, Any], retry_after: int | None = None) -> None:
        """`retry_after` is the number of seconds after which the API says that the request may be sent again."""
        error = body.get("error")
        if not isinstance(error, dict):
            error = {}
        self.status = status
        self.retry_after = retry_after
        self.code = str(error.get("code") or "")
        self.param = str(error.get("param") or "")
        self.message = str(error.get("message") or "The API refused the request without a reason.")
        super().__init__(self.message)

    @property
    def is_undecided(self) -> bool:
        """Return True where the request may have been carried out all the same: to send it again with the same
        `Idempotency-Key` is safe."""
        return self.status >= 500


def timeout_error(message: str) -> ApiError:
    """Return the refusal of a page that has waited too long."""
    return ApiError(504, {"error": {"code": "timeout", "message": message}})


class Api:
    """Asks the API of this listener."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def get(self, session: Session, path: str, /, **query: object) -> Any:
        """Return the JSON of a GET. Parameters that are None are left out; a list repeats its parameter. Raises
        `ApiError`."""
        return await self.request(session, ApiRequest("GET", path, query))

    async def post(self, session: Session, path: str, body: object = None, **headers: str) -> Any:
        """Return the JSON of a POST; `headers` are further ones, with underscores for hyphens. Raises `ApiError`."""
        return await self.request(session, ApiRequest("POST", path, body=body, headers=headers))

    async def request(self, session: Session, request: ApiRequest, *, within: float = DEADLINE_SECONDS) -> Any:
        """Return the JSON of one reply. Raises `ApiError`, also where the API has no answer `within` that many
        seconds."""
        exchange = await self._prepare(session, request)
        try:
            async with asyncio.timeout(within):
                await self._app(exchange.scope, exchange.receive, exchange.collect)
        except TimeoutError:
            raise timeout_error(f"The API has not answered within {within:.0f} seconds. Try again.") from None
        if exchange.status >= 400:
            raise exchange.refusal(bytes(exchange.body))
        return _json(bytes(exchange.body))

    async def begin_run(self, session: Session, path: str, body: object, key: str) -> str:
        """Begin a run by a request for a stream, leave the stream at its first event, and return the run's id.

        `key` is the request's `Idempotency-Key`: with it the run goes on though nobody follows it, and the same
        request sent again leads to the same run. Raises `ApiError`.
        """
        request = ApiRequest("POST", path, body=body, headers={"idempotency_key": key})
        async with self._open_stream(session, request) as exchange:
            try:
                async with asyncio.timeout(DEADLINE_SECONDS), aclosing(exchange.read_events()) as events:
                    await anext(events, None)
            except TimeoutError:
                raise timeout_error(
                    f"The run has not begun within {DEADLINE_SECONDS:.0f} seconds. Try again."
                ) from None
            return exchange.headers.get("x-baton-run", "")

    @asynccontextmanager
    async def events(
        self,
        session: Session,
        path: str,
        *,
        query: Mapping[str, object] | None = None,
        last_event_id: str | None = None,
    ) -> AsyncIterator[AsyncIterator[Event]]:
        """Yield the events of a GET's stream until it ends; leaving the block disconnects. Reading raises `ApiError`.

        Keep-alives of the API come as events without a name and without data.
        """
        headers = {}
        if last_event_id:
            headers["last-event-id"] = last_event_id
        request = ApiRequest("GET", path, query or {}, headers=headers)
        async with self._open_stream(session, request) as exchange:
            yield exchange.read_events()

    @asynccontextmanager
    async def _open_stream(self, session: Session, request: ApiRequest) -> AsyncIterator["_Exchange"]:
        """Open a request whose reply comes as a stream; leaving the block disconnects."""
        headers = {**request.headers, "accept": "text/event-stream"}
        exchange = await self._prepare(session, replace(request, headers=headers))
        failure: Exception | None = None
        async with asyncio.TaskGroup() as group:
            serving = group.create_task(self._serve(exchange))
            try:
                yield exchange
            except Exception as error:
                failure = error  # raised below, without an exception group around it
            finally:
                exchange.disconnect()
                serving.cancel()
        if failure is not None:
            raise failure

    async def _prepare(self, session: Session, request: ApiRequest) -> "_Exchange":
        """Return a request that is ready to be sent; where a person's session changes something, with its CSRF
        token."""
        headers = dict(request.headers)
        if session.via == "oidc" and request.method not in ("GET", "HEAD"):
            me = await self.get(session, "/admin/v1/me")
            headers["x-csrf-token"] = str(me["csrf_token"])
        body = b""
        if request.body is not None:
            body = orjson.dumps(request.body)
        return _Exchange(_scope(session, replace(request, headers=headers), len(body)), body)

    async def _serve(self, exchange: "_Exchange") -> None:
        """Run the application for a stream, and end the stream whatever becomes of it."""
        try:
            await self._app(exchange.scope, exchange.receive, exchange.queue)
        finally:
            exchange.end()


class _Exchange:
    """The two ends of one request in process."""

    def __init__(self, scope: Scope, body: bytes) -> None:
        self.scope = scope
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = bytearray()
        self._request_body = body
        self._is_body_read = False
        self._disconnected = asyncio.Event()
        self._parts: asyncio.Queue[bytes | None] = asyncio.Queue(UNREAD_PARTS)
        self._is_ended = False

    async def receive(self) -> Message:
        """Return the request's body, then nothing until the console leaves."""
        if not self._is_body_read:
            self._is_body_read = True
            return {"type": "http.request", "body": self._request_body, "more_body": False}
        await self._disconnected.wait()
        return {"type": "http.disconnect"}

    async def collect(self, message: Message) -> None:
        """Keep the reply whole."""
        if message["type"] == "http.response.start":
            self._start(message)
        else:
            self.body += message.get("body", b"")

    async def queue(self, message: Message) -> None:
        """Hand the reply on in parts; a part waits while too many are unread."""
        if message["type"] == "http.response.start":
            self._start(message)
        elif part := message.get("body", b""):
            await self._parts.put(part)

    def _start(self, message: Message) -> None:
        self.status = message["status"]
        headers = message.get("headers", ())
        self.headers = {name.decode("latin-1").lower(): value.decode("latin-1") for name, value in headers}

    @property
    def retry_after(self) -> int | None:
        """Return the seconds of the reply's `Retry-After`."""
        seconds = self.headers.get("retry-after", "")
        if not seconds.isdecimal():
            return None
        return int(seconds)

    def refusal(self, body: bytes) -> ApiError:
        """Return the error for a reply of status 400 or more; its body may be no JSON object."""
        reply = _json(body)
        if not isinstance(reply, dict):
            reply = {}
        return ApiError(self.status, reply, self.retry_after)

    def disconnect(self) -> None:
        """Say that nobody reads any more."""
        self._disconnected.set()

    def end(self) -> None:
        """Say that nothing more will come."""
        self._is_ended = True
        with suppress(asyncio.QueueFull):  # the reader looks at `_is_ended` as soon as it has emptied the queue
            self._parts.put_nowait(None)

    async def read_events(self) -> AsyncGenerator[Event]:
        """Yield the stream's events. Raises `ApiError` if the reply is a refusal."""
        rest = b""
        async for part in self._read_parts():
            rest += part
            if self.status < 400:
                *whole, rest = rest.replace(b"\r\n", b"\n").split(b"\n\n")
                for block in whole:
                    yield _event(block)
            if len(rest) > EVENT_BYTES:
                return
        if self.status >= 400:
            raise self.refusal(rest)

    async def _read_parts(self) -> AsyncIterator[bytes]:
        while not (self._is_ended and self._parts.empty()):
            part = await self._parts.get()
            if part is None:
                return
            yield part


def _event(block: bytes) -> Event:
    """Parse one event of a stream, by the rules of server-sent events for the fields that Baton sends."""
    fields: dict[str, list[str]] = {"id": [], "event": [], "data": []}
    for line in block.decode(errors="replace").split("\n"):
        name, _, value = line.partition(":")
        fields.get(name, []).append(value.removeprefix(" "))
    return Event("".join(fields["id"][-1:]), "".join(fields["event"][-1:]), "\n".join(fields["data"]))


def _json(body: bytes) -> Any:
    if not body:
        return None
    try:
        return orjson.loads(body)
    except orjson.JSONDecodeError:
        return None


def path_segment(text: str) -> str:
    """Return one segment of a path, of a text that anybody may have chosen."""
    return quote(text, safe="")


def _scope(session: Session, request: ApiRequest, body_size: int) -> dict[str, Any]:
    """Return the ASGI scope of a request with a body of `body_size` bytes."""
    headers = {"host": "console", "content-type": "application/json", **dict(session.headers)}
    for name, value in request.headers.items():
        headers[name.replace("_", "-").lower()] = value
    headers["content-length"] = str(body_size)  # a route whose body is optional reads none where none is announced
    query = [(name, value) for name, value in request.query.items() if value not in (None, "")]
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": "http",
        "path": unquote(request.path),
        "raw_path": request.path.encode(),
        "root_path": "",
        "query_string": urlencode(query, doseq=True).encode(),
        "headers": [(name.encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers.items()],
        "client": ("console", 0),
        "server": ("console", 80),
    }
