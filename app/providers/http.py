"""HTTP to the providers: one client per endpoint, hard deadlines, and a close that reaches the other side at once.

httpx over the aiohttp transport: httpx's own pool scans its idle connections at each request, which costs 3 to 5 times
the CPU. Requests are built ready-made and cookies are never kept, because per call that halves what httpx adds. Nothing
is retried, no redirect is followed, nothing is read from the environment. `wiring.py` closes what it builds.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from http.cookiejar import CookieJar
from typing import Any, Protocol, Self

import aiohttp
import httpx
from httpx_aiohttp import AiohttpTransport

from app.core.chat import End, Piece
from app.core.pool import ProviderSpec
from app.errors import (
    ConfigInvalid,
    WorkerError,
    WorkerMisconfigured,
    WorkerTimeout,
    WorkerTruncated,
    WorkerUnavailable,
)
from app.providers.document import peek
from app.providers.faults import by_status, fault, malformed
from app.providers.protocol import Deadlines
from app.providers.sse import EVENT_BYTES, EventReader

CONNECTIONS = 512
"""For one endpoint; a call waits for a free one within its connect deadline."""
KEEP_ALIVE = 20.0
"""Seconds; below what providers and their load balancers allow, so that we rarely send into a closing connection."""
ERROR_BYTES = 64 << 10
TAIL = 5.0
"""Seconds to wait, once the answer is complete, for what may follow it (usage, the end of the stream)."""
DRAIN = 0.05
"""Seconds to wait for the end of the body after the terminal marker, which saves the connection for the next call."""
CLOSE = 1.0
_FAILURES = (httpx.HTTPError, httpx.StreamError, httpx.InvalidURL, aiohttp.ClientError, OSError)


class Reading(Protocol):
    """One reply of a wire format while it arrives. Pure; raises WorkerError for what breaks the format."""

    @property
    def done(self) -> bool:
        """The terminal marker was seen: nothing that follows matters."""
        ...

    @property
    def complete(self) -> bool:
        """The answer is whole, though usage or the marker may still follow."""
        ...

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """Take one event and append what it says."""
        ...

    def whole(self, body: bytes, pieces: list[Piece]) -> None:
        """Take a reply that was not streamed and append what it says, without the end."""
        ...

    def end(self) -> End:
        """The terminal marker; raises WorkerTruncated if there was none."""
        ...


class _NoCookies(CookieJar):
    """A provider's cookies are neither kept nor parsed."""

    def extract_cookies(self, response: Any, request: Any) -> None:
        """Nothing is taken."""


class Endpoint:
    """An origin, the key that belongs to it, and the connections to it."""

    def __init__(
        self, spec: ProviderSpec, base_url: str, headers: Mapping[str, str], secrets: Mapping[str, str]
    ) -> None:
        """`secrets` are the headers that carry the key; raises ConfigInvalid for a URL or a key that cannot be used."""
        self.name = spec.name
        self._base = _checked_url(spec.name, base_url)
        _check_secrets(spec.name, secrets)
        fixed = {"content-type": "application/json", "accept-encoding": "identity", "user-agent": "baton"}
        self._headers = httpx.Headers({**fixed, **headers})
        self._secrets = dict(secrets)
        self._urls: dict[str, httpx.URL] = {}
        transport = AiohttpTransport(verify=httpx.create_ssl_context(trust_env=False), client=self._session)
        self._ssl = transport.ssl_context
        self._client = httpx.AsyncClient(transport=transport, trust_env=False, cookies=_NoCookies())

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, {self._base!r})"

    def _session(self) -> aiohttp.ClientSession:
        """Called by the transport inside the loop, at the first request. aiohttp sets TCP_NODELAY by itself."""
        connector = aiohttp.TCPConnector(limit=CONNECTIONS, keepalive_timeout=KEEP_ALIVE, ssl=self._ssl)
        return aiohttp.ClientSession(
            connector=connector, cookie_jar=aiohttp.DummyCookieJar(), trust_env=False, auto_decompress=False
        )

    def url(self, path: str) -> httpx.URL:
        """The address of a path below the endpoint's own URL."""
        if path not in self._urls:
            self._urls[path] = httpx.URL(str(self._base) + path)
        return self._urls[path]

    def request(self, url: httpx.URL, body: bytes, deadlines: Deadlines, who: str) -> httpx.Request:
        """A POST with the key; raises WorkerMisconfigured rather than show the key to another origin."""
        if (url.scheme, url.host, url.port) != (self._base.scheme, self._base.host, self._base.port):
            raise fault(WorkerMisconfigured, who, "the key belongs to another origin")
        request = httpx.Request(
            "POST",
            url,
            headers=self._headers,
            content=body,
            extensions={"timeout": {"connect": deadlines.connect, "pool": deadlines.connect}},
        )
        request.headers.update(self._secrets)
        return request

    async def send(self, request: httpx.Request) -> httpx.Response:
        """The response with its body unread."""
        return await self._client.send(request, stream=True, follow_redirects=False)

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        await self._client.aclose()


async def exchange(
    endpoint: Endpoint, path: str, body: bytes, deadlines: Deadlines, reading: Reading, who: str, *, streams: bool
) -> AsyncIterator[list[Piece]]:
    """Send once, and yield all pieces that each network read completed; keeps what `protocol.py` promises."""
    async with Call(endpoint, path, body, deadlines, who, streams=streams) as call:
        if call.whole:
            pieces: list[Piece] = []
            reading.whole(await call.rest(), pieces)
            pieces.append(reading.end())
            yield pieces
            return
        events = EventReader(who)
        while not reading.done:
            read = await call.read(answered=reading.complete)
            pieces, broken = _pieces(reading, events, read)
            if pieces:
                yield pieces
            if broken:
                raise broken
            if not read:
                return
        await call.drain()


def _pieces(reading: Reading, events: EventReader, read: bytes) -> tuple[list[Piece], WorkerError | None]:
    """What one read says, and what is wrong with it: the pieces before a fault are paid for, so they are not lost."""
    pieces: list[Piece] = []
    try:
        for event in events.feed(read):
            reading.event(event, pieces)
            if reading.done:
                break
        if reading.done or not read:
            pieces.append(reading.end())
    except WorkerError as error:
        return pieces, error
    return pieces, None


class Call:
    """One request on the wire, from connecting to closing, with its deadlines."""

    def __init__(
        self, endpoint: Endpoint, path: str, body: bytes, deadlines: Deadlines, who: str, *, streams: bool
    ) -> None:
        self._endpoint, self._path, self._body, self._who = endpoint, path, body, who
        self._streams = streams
        self._deadlines = deadlines
        self._clock = asyncio.get_running_loop().time
        started = self._clock()
        self._end = started + deadlines.total
        # A server that does not stream says nothing until it is done, so the first byte may take all the time there is.
        self._first = started + (deadlines.first if streams else deadlines.total)
        self._begun = False
        self.whole = not streams

    async def __aenter__(self) -> Self:
        """Send; raises for everything but a 200."""
        endpoint, who = self._endpoint, self._who
        request = endpoint.request(endpoint.url(self._path), self._body, self._deadlines, who)
        try:
            async with asyncio.timeout_at(min(self._first, self._end)):
                self._response = await endpoint.send(request)
        except _FAILURES as error:
            raise self._fault(error, WorkerUnavailable) from None
        self._reads = self._response.aiter_raw()
        try:
            await self._check()
        except BaseException:
            await self._close()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        await self._close()

    async def read(self, *, answered: bool = False) -> bytes:
        """What the network gives next, empty at the end. When `answered`, a fault is an end like any other."""
        now = self._clock()
        gap = min(self._deadlines.gap, TAIL) if answered else self._deadlines.gap
        limit = min(now + gap if self._begun else self._first, self._end)
        try:
            if now >= self._end:
                raise TimeoutError
            async with asyncio.timeout_at(limit):
                read = await anext(self._reads, b"")
        except _FAILURES as error:
            if answered:
                return b""
            raise self._fault(error, WorkerTruncated) from None
        self._begun = True
        return read

    async def rest(self, limit: int = EVENT_BYTES) -> bytes:
        """All that is left; raises WorkerMalformed beyond `limit` bytes."""
        reads: list[bytes] = []
        left = limit
        while read := await self.read():
            reads.append(read)
            left -= len(read)
            if left < 0:
                raise malformed(self._who, f"a reply of more than {limit >> 10} KiB")
        return b"".join(reads)

    async def drain(self) -> None:
        """Read to the end if that is near, so that the connection can be used again."""
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(DRAIN):
                for _ in range(4):
                    if not await anext(self._reads, b""):
                        return

    async def _check(self) -> None:
        response, who = self._response, self._who
        if response.status_code != 200:
            try:
                document = peek(await self.rest(ERROR_BYTES))
            except WorkerError:
                document = None
            raise by_status(who, response.status_code, response.headers, document)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/html":
            raise malformed(who, "a web page")
        self.whole = kind == "application/json" or (self.whole and kind != "text/event-stream")

    async def _close(self) -> None:
        """Unless the body was read to its end, this closes the connection: the provider stops writing, and billing."""
        with contextlib.suppress(*_FAILURES):
            async with asyncio.timeout(CLOSE):
                await self._response.aclose()

    def _fault(self, error: Exception, otherwise: type[WorkerError]) -> WorkerError:
        """The transport's own exception stands behind httpx's, which calls a lost connection a timeout."""
        cause = error.__cause__ or error if isinstance(error, httpx.HTTPError) else error
        if isinstance(cause, TimeoutError):
            stage = "in all" if self._clock() >= self._end else "between reads" if self._begun else "to the first byte"
            return fault(WorkerTimeout, self._who, f"too long {stage}")
        if isinstance(cause, aiohttp.ClientResponseError):
            return malformed(self._who, "no HTTP")
        return fault(otherwise, self._who, type(cause).__name__)


def _checked_url(name: str, text: str) -> httpx.URL:
    try:
        url = httpx.URL(text.rstrip("/"))
    except (httpx.InvalidURL, ValueError):
        url = httpx.URL("")
    if url.scheme not in ("http", "https") or not url.host or url.userinfo or url.query or url.fragment:
        raise ConfigInvalid(
            [f"provider {name}: base_url must be http(s)://host[:port][/path], with nothing else in it"]
        )
    return url


def _check_secrets(name: str, secrets: Mapping[str, str]) -> None:
    if not all(value.isascii() and value.isprintable() and value.strip() == value for value in secrets.values()):
        raise ConfigInvalid(
            [f"provider {name}: its key has a blank, a line break or a letter that no header can carry"]
        )
