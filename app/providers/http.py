"""HTTP to the providers: one client for each endpoint, hard deadlines, and a close that ends the connection at once.

Nothing is retried, no redirect is followed, no cookie is stored, and no proxy is taken from the environment: see
`network/http_client.py`. `wiring.py` closes what it builds.
"""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from types import MappingProxyType
from typing import Any, Protocol, Self, cast

import httpx
from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import End, Keepsake, Piece
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.errors import (
    ConfigInvalid,
    Failure,
    WorkerError,
    WorkerMalformed,
    WorkerMisconfigured,
    WorkerTimeout,
    WorkerTruncated,
    WorkerUnavailable,
)
from app.network.http_client import async_client
from app.providers.authentication import Authentication, authentication
from app.providers.document import peek, refuse_deep
from app.providers.excerpt import excerpt, label
from app.providers.faults import WORDS, error_by_status, fault, malformed_reply

ERROR_BYTES = 64 << 10
"""Most of an error's body that is read."""
WHOLE_SHARE = 0.6
"""Share of the total deadline that the first byte of a whole reply may take: such a reply sends nothing until it is
complete, and the rest of the time is for another worker, should this one hang."""
TAIL = 5.0
"""Seconds to wait for what is optional: what follows a complete answer (usage, the end), and an error's body."""
DRAIN = 0.05
"""Seconds to wait for the end of the body after the terminal marker, which saves the connection for the next call."""
NO_HEADERS: Mapping[str, str] = MappingProxyType({})
_ERRORS = (httpx.HTTPError, OSError)
"""All that a call over the network raises; a TimeoutError is an OSError."""
ERROR_CLASSES: tuple[tuple[type[Exception], type[WorkerError], type[WorkerError]], ...] = (
    (TimeoutError, WorkerTimeout, WorkerTimeout),
    (httpx.TimeoutException, WorkerTimeout, WorkerTimeout),
    (httpx.ProtocolError, WorkerMalformed, WorkerMalformed),
    (httpx.HTTPError, WorkerUnavailable, WorkerTruncated),
    (OSError, WorkerUnavailable, WorkerTruncated),
)
"""The class of each error of the network: before the response's headers have come, and after. The first row that fits
counts."""
REQUEST_ID_HEADERS = ("x-request-id", "request-id", "x-ms-request-id", "apim-request-id", "x-amzn-requestid", "cf-ray")
"""The headers in which providers, or what stands before them, give a request's id; the first of them counts."""
EVENT_BYTES = 8 << 20
"""Most bytes of one event, and of a reply that is not streamed."""
STREAM_BYTES = 64 << 20
"""Most bytes of a stream."""
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventReader:
    """An incremental parser of server-sent events: it takes the bytes of each read, cut anywhere, and returns the data
    of the events that they complete.

    Source: WHATWG HTML, "Server-sent events". Only the `data` lines are parsed, because the wire formats need no
    other: the event's name, where there is one, is repeated inside the data. A lone carriage return, which none of them
    sends, does not end a line here. An event that the stream breaks off before its blank line is dropped, as the
    standard demands.
    """

    __slots__ = ("_data", "_rest", "_sender", "_size", "_total")

    def __init__(self, sender: str) -> None:
        """`sender` is named in errors."""
        self._sender = sender
        self._rest: list[bytes] = []
        self._data: list[bytes] = []
        self._size = 0
        """Bytes of the event that is not complete yet."""
        self._total = 0

    def feed(self, read: bytes) -> list[bytes]:
        """Return the data of each completed event, in order; raises WorkerMalformed beyond the bounds above."""
        if not self._total:
            read = read.removeprefix(_BYTE_ORDER_MARK)
        self._total += len(read)
        if self._total > STREAM_BYTES:
            raise malformed_reply(self._sender, f"a stream of more than {STREAM_BYTES >> 20} MiB")
        if b"\n" not in read:
            self._hold(read)
            return []
        if self._rest:
            read = b"".join((*self._rest, read))
            self._rest = []
        *lines, rest = read.split(b"\n")
        events = self._take(lines)
        self._size = sum(map(len, self._data))
        self._hold(rest)
        return events

    def _hold(self, rest: bytes) -> None:
        self._size += len(rest)
        if self._size > EVENT_BYTES:
            raise malformed_reply(self._sender, f"an event of more than {EVENT_BYTES >> 20} MiB")
        if rest:
            self._rest.append(rest)

    def _take(self, lines: list[bytes]) -> list[bytes]:
        events: list[bytes] = []
        data = self._data
        for line in lines:
            if line.endswith(b"\r"):
                line = line[:-1]
            if line.startswith(b"data: "):
                data.append(line[6:])
            elif line.startswith(b"data:"):
                data.append(line[5:])
            elif not line and data:
                events.append(b"\n".join(data))
                data.clear()
        if events and max(map(len, events)) > EVENT_BYTES:
            raise malformed_reply(self._sender, f"an event of more than {EVENT_BYTES >> 20} MiB")
        return events


class ReplyReader(Protocol):
    """Reads one reply of a wire format while it arrives. Pure; raises WorkerError for what breaks the format."""

    @property
    def done(self) -> bool:
        """Return True once the terminal marker was read: nothing that follows matters."""
        ...

    @property
    def complete(self) -> bool:
        """Return True once the answer is whole, though usage or the marker may still follow."""
        ...

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """Parse one event and append its pieces."""
        ...

    def read_whole(self, body: bytes, pieces: list[Piece]) -> None:
        """Parse a reply that was not streamed and append its pieces, without the end."""
        ...

    def end(self) -> End:
        """Return the end of the answer; raises WorkerTruncated if there was no terminal marker."""
        ...

    def keepsake(self) -> Mapping[str, Any]:
        """Return what the provider wants back with this turn, if it has tool calls; empty if nothing."""
        ...


class StreamDecoder(Protocol):
    """Splits a stream into its events."""

    def feed(self, read: bytes) -> list[bytes]:
        """Return the events that these bytes complete; raises WorkerMalformed."""
        ...


class Endpoint:
    """An origin, the key that belongs to it, and the connections to it."""

    def __init__(
        self,
        spec: ProviderSpec,
        base_url: str,
        headers: Mapping[str, str],
        secrets: Mapping[str, str],
        proxy_credentials: str | None = None,
    ) -> None:
        """`secrets` are the headers that carry the key, `proxy_credentials` the `user:password` of the spec's proxy.

        Raises ConfigInvalid for a URL, a key or a file of the spec's route that cannot be used.
        """
        self.name = spec.name
        self.base = _parse_url(spec.name, base_url)
        _check_secrets(spec.name, secrets)
        fixed = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "baton"}
        self._headers = httpx.Headers({**fixed, **headers, **secrets})
        self.secrets = tuple(secrets.values())
        """Texts that may appear in no error."""
        if proxy_credentials:
            self.secrets += (proxy_credentials,)
        self._fixed_secrets = self.secrets
        self._auth = authentication(spec)
        self._query = f"api-version={spec.api_version}" if spec.api_version else ""
        self._urls: dict[str, httpx.URL] = {}
        # The connections have no bound of their own: calls are bounded by the slots of engines, and one that waited
        # here for a connection would be taken for one whose worker does not answer.
        self._client = async_client(headers={}, route=spec.route, proxy_credentials=proxy_credentials)

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, {str(self.base)!r})"

    def url(self, path: str) -> httpx.URL:
        """Return the address of a path below the endpoint's own URL; the path is quoted already."""
        if path not in self._urls:
            address = str(self.base).rstrip("/") + path
            if self._query:
                separator = "&" if "?" in path else "?"
                address += separator + self._query
            self._urls[path] = httpx.URL(address)
        return self._urls[path]

    async def post(
        self, url: httpx.URL, body: bytes, connect: float, sender: str, headers: Mapping[str, str] = NO_HEADERS
    ) -> httpx.Response:
        """Send a request and return the response with its body unread.

        `connect` is in seconds and covers the name look-up, the connection and its TLS. Raises WorkerMisconfigured for
        an address of another origin, because the key must not be shown to it.
        """
        if (url.scheme, url.netloc) != (self.base.scheme, self.base.netloc):
            raise fault(WorkerMisconfigured, sender, "the key belongs to another origin")
        limits = {"connect": connect, "pool": connect, "read": None, "write": None}
        # Building the request here costs half of what `AsyncClient.build_request` does, which merges it with defaults.
        all_headers = self._headers
        if headers or self._auth is not None:
            all_headers = all_headers.copy()
            all_headers.update(headers)
        if self._auth is not None:
            all_headers.update(await self._authentication_headers(self._auth, url, body, sender))
        request = httpx.Request("POST", url, headers=all_headers, content=body, extensions={"timeout": limits})
        return await self._client.send(request, stream=True)

    async def _authentication_headers(
        self, auth: Authentication, url: httpx.URL, body: bytes, sender: str
    ) -> Mapping[str, str]:
        """Return the headers that a cloud's library makes; raises WorkerMisconfigured if it finds no credentials or
        fails."""
        try:
            headers = await auth.headers(str(url), body)
        except Exception as error:
            note = f"no credentials: {type(error).__name__}"
            raise fault(WorkerMisconfigured, sender, note, failure=Failure("authentication")) from None
        secret = headers.get("authorization", "")
        if secret.startswith("Bearer ") and secret not in self.secrets:
            self.secrets = (*self._fixed_secrets, secret, secret.removeprefix("Bearer "))
        return headers

    def forget_credentials(self) -> None:
        """Have credentials that a cloud's library has found be looked for anew: they may have been replaced."""
        if self._auth is not None:
            self._auth.forget()

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        await self._client.aclose()


class ProviderRequest(Struct, frozen=True):
    """One request to a provider: what is sent, and how long each part of the reply may take."""

    path: str
    body: bytes
    deadlines: Deadlines
    sender: str
    """The worker and its provider, which errors name."""
    streams: bool
    """True if the reply is expected as a stream."""
    headers: Mapping[str, str]
    """Headers that replace those of the endpoint."""


async def exchange(
    endpoint: Endpoint, request: ProviderRequest, reader: ReplyReader, decoder: StreamDecoder | None = None
) -> AsyncIterator[list[Piece]]:
    """Send the request once and yield all pieces that each network read completed, as `protocol.py` promises.

    `decoder` splits a stream that does not consist of server-sent events.
    """
    call = Call(endpoint, request)
    try:
        async with call:
            if call.is_whole:
                pieces: list[Piece] = []
                reader.read_whole(await call.read_rest(), pieces)
                _end(reader, pieces, request.sender)
                yield pieces
                return
            if decoder is None:
                decoder = EventReader(request.sender)
            while not reader.done:
                read = await call.read(answered=reader.complete)
                pieces, error = _pieces(reader, decoder, read, request.sender)
                if pieces:
                    yield pieces
                if error is not None:
                    raise error
                if not read:
                    return
            await call.drain()
    except WorkerError as error:
        error.failure = call.explain_failure(error.failure)
        if error.failure.reason == "authentication":
            endpoint.forget_credentials()
        raise


def _pieces(
    reader: ReplyReader, decoder: StreamDecoder, read: bytes, sender: str
) -> tuple[list[Piece], WorkerError | None]:
    """Return the pieces of one read, and its error if it has one: pieces before an error are paid for and are
    returned. After a complete answer an event with an error is skipped."""
    pieces: list[Piece] = []
    try:
        for event in decoder.feed(read):
            try:
                reader.event(event, pieces)
            except WorkerError:
                if not reader.complete:
                    raise
            if reader.done:
                break
        if reader.done or not read:
            _end(reader, pieces, sender)
    except WorkerError as error:
        return pieces, error
    return pieces, None


def _end(reader: ReplyReader, pieces: list[Piece], sender: str) -> None:
    end = reader.end()
    keepsake = reader.keepsake()
    if keepsake:
        refuse_deep(keepsake, sender)
        pieces.append(Keepsake(keepsake))
    pieces.append(end)


class Call:
    """One request on the wire, from connecting to closing, with its deadlines."""

    def __init__(self, endpoint: Endpoint, request: ProviderRequest) -> None:
        self._endpoint = endpoint
        self._request = request
        self._sender = request.sender
        self._status: int | None = None
        """The HTTP status; None before the response's headers have come."""
        self._note = ""
        """The network error that ended it, in words."""
        self._clock = asyncio.get_running_loop().time
        now = self._clock()
        self._end = now + request.deadlines.total
        self._first = now + _first_byte_seconds(request)
        self._has_begun = False
        """True once a part of the body has come."""
        self.is_whole = not request.streams
        """True if the reply comes as one document; the response's media type may correct what was expected."""

    async def __aenter__(self) -> Self:
        """Send the request; raises a WorkerError for everything but a 200."""
        endpoint, request = self._endpoint, self._request
        try:
            async with asyncio.timeout_at(min(self._first, self._end)):
                self._response = await endpoint.post(
                    endpoint.url(request.path), request.body, request.deadlines.connect, request.sender, request.headers
                )
        except _ERRORS as error:
            raise self._fault(error, headers=False) from None
        self._status = self._response.status_code
        stream = cast(httpx.AsyncByteStream, self._response.stream)
        self._reads = cast(AsyncGenerator[bytes, None], aiter(stream))
        try:
            await self._check()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Unless the body was read to its end, this closes the connection: the provider stops writing, and billing."""
        await self._close()

    async def _close(self) -> None:
        await self._reads.aclose()
        await self._response.aclose()

    def explain_failure(self, failure: Failure) -> Failure:
        """Return the cause of this call's failure as it may be journaled: redacted, with the status and the provider's
        id of the request."""
        body, secrets = self._request.body, self._endpoint.secrets
        text = excerpt(failure.excerpt, body, secrets, self._request.path)
        if not text:
            text = excerpt(self._note, b"", secrets)
        return replace(
            failure,
            status=self._status,
            code=label(failure.code, body, secrets, WORDS),
            request_id=label(self._request_id(), body, secrets),
            excerpt=text,
        )

    def _request_id(self) -> str:
        """Return the id that the provider gave the request; empty if the response's headers have not come or have
        none."""
        if self._status is None:
            return ""
        for name in REQUEST_ID_HEADERS:
            if name in self._response.headers:
                return self._response.headers[name]
        return ""

    async def read(self, *, answered: bool = False) -> bytes:
        """Return the next bytes of the body, empty at the end. When `answered`, a fault is an end like any other."""
        now = self._clock()
        gap = self._request.deadlines.gap
        if answered:
            gap = min(gap, TAIL)
        limit = now + gap if self._has_begun else self._first
        limit = min(limit, self._end)
        try:
            if now >= self._end:  # what has come already would be read without waiting
                raise TimeoutError
            async with asyncio.timeout_at(limit):
                read = await anext(self._reads, b"")
        except _ERRORS as error:
            if answered:
                return b""
            raise self._fault(error, headers=True) from None
        self._has_begun = True
        return read

    async def read_rest(self, limit: int = EVENT_BYTES) -> bytes:
        """Return all that is left of the body; raises WorkerMalformed beyond `limit` bytes."""
        reads: list[bytes] = []
        bytes_left = limit
        while read := await self.read():
            reads.append(read)
            bytes_left -= len(read)
            if bytes_left < 0:
                raise malformed_reply(self._sender, f"a reply of more than {limit >> 10} KiB")
        return b"".join(reads)

    async def drain(self) -> None:
        """Read to the end if that is near, so that the connection can be used again."""
        with contextlib.suppress(*_ERRORS):
            async with asyncio.timeout(DRAIN):
                for _ in range(4):
                    if not await anext(self._reads, b""):
                        return

    async def _check(self) -> None:
        response, sender = self._response, self._sender
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if response.status_code != 200:
            raise error_by_status(sender, response.status_code, response.headers, await self._error(kind))
        if kind == "text/html":
            raise malformed_reply(sender, "a web page")
        if response.headers.get("content-encoding", "identity").strip().lower() != "identity":
            raise malformed_reply(sender, "a compressed reply, which it was asked not to send")
        if kind == "application/json":
            self.is_whole = True
        elif kind == "text/event-stream":
            self.is_whole = False

    async def _error(self, kind: str) -> object:
        """Return the body of an error as JSON, or None; `kind` is its media type, and plain text is a message."""
        try:
            async with asyncio.timeout(TAIL):
                body = await self.read_rest(ERROR_BYTES)
        except (WorkerError, TimeoutError):
            return None
        document = peek(body)
        if document is None and kind == "text/plain":
            return {"message": body.decode("utf-8", "replace")}
        return document

    def _fault(self, error: Exception, *, headers: bool) -> WorkerError:
        """Return the error of the service for one of the network; `headers` says that the response's have come."""
        before, after = next(row[1:] for row in ERROR_CLASSES if isinstance(error, row[0]))
        kind = after if headers else before
        if isinstance(error, httpx.ConnectTimeout):  # nothing was sent
            self._note = "too long to connect"
            return fault(kind, self._sender, self._note, failure=Failure("connection"))
        if kind is WorkerTimeout:
            self._note = f"too long {self._stage()}"
            return fault(kind, self._sender, self._note)
        if kind is WorkerMalformed:
            return malformed_reply(self._sender, "no HTTP")
        self._note = str(error) or type(error).__name__
        failure = Failure("connection") if kind is WorkerUnavailable else None
        return fault(kind, self._sender, self._note, failure=failure)

    def _stage(self) -> str:
        """Return which deadline has passed, in words."""
        if self._clock() >= self._end:
            return "in all"
        if self._has_begun:
            return "between reads"
        return "to the first byte"


def _first_byte_seconds(request: ProviderRequest) -> float:
    """Return the seconds that the first byte of a reply may take."""
    deadlines = request.deadlines
    if request.streams or deadlines.exact:
        return deadlines.first
    return max(deadlines.first, WHOLE_SHARE * deadlines.total)


def _parse_url(name: str, text: str) -> httpx.URL:
    try:
        url = httpx.URL(text.rstrip("/"))
    except httpx.InvalidURL:
        url = httpx.URL("")
    has_more = bool(url.userinfo or url.query or url.fragment)
    if url.scheme not in ("http", "https") or not url.host or has_more:
        raise ConfigInvalid([f"provider {name}: base_url must be http(s)://host[:port][/path] and nothing else"])
    return url


def _check_secrets(name: str, secrets: Mapping[str, str]) -> None:
    for secret in secrets.values():
        if not secret.isascii() or not secret.isprintable() or secret.strip() != secret:
            raise ConfigInvalid(
                [f"provider {name}: its key has a blank, a line break or a letter that no header can carry"]
            )
