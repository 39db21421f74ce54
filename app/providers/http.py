"""HTTP to the providers: one client per endpoint, hard deadlines, and a close that reaches the other side at once.

aiohttp itself: a call costs 0.22 ms of CPU so, and 0.46 ms with httpx over it, even with requests built ready-made.
Nothing is retried, no redirect is followed, no cookie is kept and no proxy is taken from the environment. `wiring.py`
closes what it builds.
"""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, Protocol, Self

import aiohttp
from aiohttp.http_exceptions import HttpProcessingError
from yarl import URL

from app.core.message.chat import End, Keepsake, Piece
from app.core.pool.catalog import Deadlines, ProviderSpec
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
from app.providers.sse import EVENT_BYTES, EventReader

KEEP_ALIVE = 20.0
"""Seconds; below what providers and their load balancers allow, so that we rarely send into a closing connection."""
ERROR_BYTES = 64 << 10
WHOLE_SHARE = 0.6
TAIL = 5.0
"""Seconds to wait for what is only nice to know: what follows a complete answer (usage, the end), an error's body."""
DRAIN = 0.05
"""Seconds to wait for the end of the body after the terminal marker, which saves the connection for the next call."""
_FAILURES = (aiohttp.ClientError, HttpProcessingError, OSError)
"""All that aiohttp raises; a TimeoutError is an OSError. Where the chunked encoding of a body breaks, aiohttp 3.14 does
not wake its reader: that ends at the gap deadline, as a WorkerTimeout."""


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

    def keepsake(self) -> Mapping[str, Any]:
        """What the provider wants back with this turn, if it has tool calls; empty if nothing."""
        ...


class Endpoint:
    """An origin, the key that belongs to it, and the connections to it."""

    def __init__(
        self, spec: ProviderSpec, base_url: str, headers: Mapping[str, str], secrets: Mapping[str, str]
    ) -> None:
        """`secrets` are the headers that carry the key; raises ConfigInvalid for a URL or a key that cannot be used."""
        self.name = spec.name
        self.base = _checked_url(spec.name, base_url)
        _check_secrets(spec.name, secrets)
        fixed = {"Content-Type": "application/json", "Accept-Encoding": "identity", "User-Agent": "baton"}
        self._headers = {**fixed, **headers, **secrets}
        self._urls: dict[str, URL] = {}
        self._session: aiohttp.ClientSession | None = None

    def __repr__(self) -> str:
        return f"Endpoint({self.name!r}, {str(self.base)!r})"

    def url(self, path: str) -> URL:
        """The address of a path below the endpoint's own URL; the path is quoted already."""
        if path not in self._urls:
            self._urls[path] = URL(str(self.base) + path, encoded=True)
        return self._urls[path]

    async def post(self, url: URL, body: bytes, connect: float, who: str) -> aiohttp.ClientResponse:
        """The response with its body unread; raises WorkerMisconfigured rather than show the key to another origin.

        `connect` is in seconds and covers the wait for a free connection.
        """
        if url.origin() != self.base.origin():
            raise fault(WorkerMisconfigured, who, "the key belongs to another origin")
        limits = aiohttp.ClientTimeout(connect=connect, sock_connect=connect)
        return await self._opened().post(url, data=body, timeout=limits, allow_redirects=False)

    def _opened(self) -> aiohttp.ClientSession:
        """A session belongs to a running loop, so it waits for the first call. aiohttp sets TCP_NODELAY by itself."""
        if self._session is None:
            # No bound of its own: calls are bounded by the slots of dispatchers and drivers, and one that waited here
            # for a connection would be taken for one whose worker does not answer.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE)
            cookies = aiohttp.DummyCookieJar()
            self._session = aiohttp.ClientSession(
                headers=self._headers, connector=connector, cookie_jar=cookies, trust_env=False, auto_decompress=False
            )
        return self._session

    async def close(self) -> None:
        """Close all connections; calls in flight fail."""
        if self._session is not None:
            await self._session.close()


async def exchange(
    endpoint: Endpoint, path: str, body: bytes, deadlines: Deadlines, reading: Reading, who: str, *, streams: bool
) -> AsyncIterator[list[Piece]]:
    """Send once, and yield all pieces that each network read completed; keeps what `protocol.py` promises."""
    async with Call(endpoint, path, body, deadlines, who, streams=streams) as call:
        if call.whole:
            pieces: list[Piece] = []
            reading.whole(await call.rest(), pieces)
            _end(reading, pieces)
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
            _end(reading, pieces)
    except WorkerError as error:
        return pieces, error
    return pieces, None


def _end(reading: Reading, pieces: list[Piece]) -> None:
    end = reading.end()
    if kept := reading.keepsake():
        pieces.append(Keepsake(kept))
    pieces.append(end)


class Call:
    """One request on the wire, from connecting to closing, with its deadlines."""

    def __init__(
        self, endpoint: Endpoint, path: str, body: bytes, deadlines: Deadlines, who: str, *, streams: bool
    ) -> None:
        self._endpoint, self._path, self._body, self._who = endpoint, path, body, who
        self._deadlines = deadlines
        self._clock = asyncio.get_running_loop().time
        started = self._clock()
        self._end = started + deadlines.total
        # A whole reply says nothing until it is done, so its first byte may take most of the time there is; the rest is
        # for another worker, should this one hang.
        patience = deadlines.first if streams else max(deadlines.first, WHOLE_SHARE * deadlines.total)
        self._first = started + patience
        self._begun = False
        self._until = math.inf
        self._alarm: asyncio.TimerHandle | None = None
        self.whole = not streams

    async def __aenter__(self) -> Self:
        """Send; raises for everything but a 200."""
        endpoint = self._endpoint
        try:
            async with asyncio.timeout_at(min(self._first, self._end)):
                self._response = await endpoint.post(
                    endpoint.url(self._path), self._body, self._deadlines.connect, self._who
                )
        except _FAILURES as error:
            raise self._fault(error, WorkerUnavailable) from None
        self._readany = self._response.content.readany
        try:
            await self._check()
        except BaseException:
            self._response.close()
            raise
        return self

    async def __aexit__(self, *failure: object) -> None:
        """Unless the body was read to its end, this closes the connection: the provider stops writing, and billing."""
        if self._alarm is not None:
            self._alarm.cancel()
        self._response.close()

    async def read(self, *, answered: bool = False) -> bytes:
        """What the network gives next, empty at the end. When `answered`, a fault is an end like any other."""
        now = self._clock()
        gap = min(self._deadlines.gap, TAIL) if answered else self._deadlines.gap
        limit = min(now + gap if self._begun else self._first, self._end)
        try:
            if now >= self._end:
                raise TimeoutError
            read = await self._read_until(limit)
        except _FAILURES as error:
            if answered:
                return b""
            raise self._fault(error, WorkerTruncated) from None
        self._begun = True
        return read

    async def _read_until(self, limit: float) -> bytes:
        """One read, or TimeoutError. `asyncio.timeout_at` sets a timer and cancels it for each read, which cost as much
        as all the rest of a delta; this one is set anew when it rings, mostly once in a call."""
        if self._alarm is None or limit < self._alarm.when():
            self._set_alarm(limit)
        self._until = limit
        try:
            return await self._readany()
        finally:
            self._until = math.inf

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        if self._clock() >= self._until:
            self._response.content.set_exception(TimeoutError())  # wakes whoever reads
        elif self._until < math.inf:
            self._set_alarm(self._until)

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
                    if not await self._readany():
                        return

    async def _check(self) -> None:
        response, who = self._response, self._who
        if response.status != 200:
            try:
                async with asyncio.timeout(TAIL):
                    document = peek(await self.rest(ERROR_BYTES))
            except (WorkerError, TimeoutError):
                document = None
            raise by_status(who, response.status, response.headers, document)
        kind = response.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind == "text/html":
            raise malformed(who, "a web page")
        self.whole = kind == "application/json" or (self.whole and kind != "text/event-stream")

    def _fault(self, error: Exception, otherwise: type[WorkerError]) -> WorkerError:
        if isinstance(error, TimeoutError):
            stage = "in all" if self._clock() >= self._end else "between reads" if self._begun else "to the first byte"
            return fault(WorkerTimeout, self._who, f"too long {stage}")
        if isinstance(error, aiohttp.ClientResponseError | HttpProcessingError):
            return malformed(self._who, "no HTTP")
        return fault(otherwise, self._who, type(error).__name__)


def _checked_url(name: str, text: str) -> URL:
    try:
        url = URL(text.rstrip("/"))
    except ValueError:
        url = URL()
    spare = url.user or url.password or url.query_string or url.fragment
    if url.scheme not in ("http", "https") or not url.host or spare:
        raise ConfigInvalid([f"provider {name}: base_url must be http(s)://host[:port][/path] and nothing else"])
    return url


def _check_secrets(name: str, secrets: Mapping[str, str]) -> None:
    if not all(value.isascii() and value.isprintable() and value.strip() == value for value in secrets.values()):
        raise ConfigInvalid(
            [f"provider {name}: its key has a blank, a line break or a letter that no header can carry"]
        )
