"""The HTTP client of the service: httpx over aiohttp's connections.

httpx's own transport scans its pool at every request: a call over it costs five times the CPU of one over
`httpx-aiohttp` (`python -m tests.bench.transport`). Clients made here retry nothing, follow no redirect, keep no
cookie, decompress nothing, and take neither a proxy nor credentials from the environment: a proxy, certificate
authorities and a client certificate are used where a `Route` names them, and nowhere else.
"""

import base64
import os
import re
import socket
import ssl
from collections.abc import AsyncGenerator, Mapping
from typing import Any, cast

import aiohttp
import httpx
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from httpx_aiohttp import AiohttpTransport

from app.core.pool.catalog import DIRECT, Route
from app.network import tls

KEEP_ALIVE_SECONDS = 20.0
"""Seconds for which an idle connection is kept: less than what most servers and load balancers allow, so that a request
is rarely sent into a connection that is being closed. (vLLM allows 5 by default; the guide sets it higher.)"""
_STREAM = "stream"
"""The extension of a response under which the transport leaves its stream."""
_RAISED = (httpx.HTTPError, aiohttp.ClientError, HttpProcessingError)
"""The errors that `AiohttpTransport` raises: it gives some of aiohttp's errors a class of httpx, and leaves others."""
_HTTPX_ERRORS: tuple[tuple[type[Exception], type[httpx.TransportError]], ...] = (
    (aiohttp.ConnectionTimeoutError, httpx.ConnectTimeout),
    (aiohttp.ServerTimeoutError, httpx.ReadTimeout),
    (aiohttp.ClientHttpProxyError, httpx.ProxyError),
    (aiohttp.ClientProxyConnectionError, httpx.ProxyError),
    (aiohttp.ClientConnectorError, httpx.ConnectError),
    (aiohttp.ClientConnectionError, httpx.ReadError),
    (aiohttp.ClientPayloadError, httpx.ReadError),
    (aiohttp.ClientResponseError, httpx.RemoteProtocolError),
    (HttpProcessingError, httpx.RemoteProtocolError),
    (aiohttp.ClientError, httpx.NetworkError),
)
"""aiohttp's errors under httpx's names; the first row that fits counts. The table of `httpx-aiohttp` 0.2 calls a reset
connection a time-out of connecting, and leaves out what is no HTTP."""


def async_client(
    *,
    headers: Mapping[str, str],
    timeout: httpx.Timeout | None = None,
    connections: int = 0,
    base_url: str = "",
    route: Route = DIRECT,
    proxy_credentials: str | None = None,
    transport: httpx.AsyncBaseTransport | None = None,
) -> httpx.AsyncClient:
    """Return a client that opens its connections when it is first used, in the event loop of that moment. Close it.

    `connections` bounds those that are open at a time; 0 means that the callers bound them. A request waits for a free
    one as long as `timeout.pool` says. `proxy_credentials` are the `user:password` of the route's proxy. Raises
    ConfigInvalid if the route's files cannot be used. `transport` replaces the network. Errors of requests are httpx's
    `TransportError`s, and OSErrors.
    """
    proxy = None
    if route.proxy:
        # aiohttp takes `Authorization` for the proxy's own, and sends it as `Proxy-Authorization`.
        own = {"Authorization": _basic(proxy_credentials)} if proxy_credentials else {}
        proxy = httpx.Proxy(route.proxy, headers=own)
    return _Client(
        base_url=base_url,
        headers=headers,
        timeout=timeout,
        transport=transport or Transport(context=tls.tls_context(route), connections=connections, proxy=proxy),
        trust_env=False,
    )


def client(
    *, headers: Mapping[str, str], timeout: float, route: Route = DIRECT, proxy_credentials: str | None = None
) -> httpx.Client:
    """Return a client without an event loop, for the command line: httpx as it is, under the same rules; `timeout` is
    in seconds. Raises ConfigInvalid if the route's files cannot be used."""
    context = tls.tls_context(route)
    own = {"Proxy-Authorization": _basic(proxy_credentials)} if proxy_credentials else {}
    proxy = httpx.Proxy(route.proxy, headers=own) if route.proxy else None
    return httpx.Client(headers=headers, timeout=timeout, verify=context, proxy=proxy, trust_env=False)


def _basic(credentials: str) -> str:
    return "Basic " + base64.b64encode(credentials.encode()).decode()


class Transport(AiohttpTransport):
    """The transport of `httpx-aiohttp` with a session of our own and errors under their proper names.

    aiohttp sets TCP_NODELAY on every connection by itself.
    """

    def __init__(self, *, context: ssl.SSLContext, connections: int, proxy: httpx.Proxy | None) -> None:
        """`connections` as in `async_client`."""
        super().__init__(verify=context, trust_env=False, proxy=proxy, client=self._session)
        self._connections = connections

    def _session(self) -> aiohttp.ClientSession:
        """Make the session at the first request, because it belongs to a running loop."""
        connector = aiohttp.TCPConnector(
            limit=self._connections, keepalive_timeout=KEEP_ALIVE_SECONDS, ssl=self.ssl_context
        )
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            trust_env=False,
            auto_decompress=False,
            response_class=_Response,
        )

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        """Send the request and return the response with its body unread."""
        try:
            response = await super().handle_async_request(request)
        except _RAISED as error:
            raise _httpx_error(error) from error
        response.stream = _Body(cast(httpx.AsyncByteStream, response.stream))
        response.extensions[_STREAM] = response.stream
        return response


class _Response(aiohttp.ClientResponse):
    """A response without the words behind its status, which may be in any encoding: `httpx-aiohttp` fails on those that
    are not UTF-8, and nobody reads them."""

    async def start(self, connection: Connection) -> aiohttp.ClientResponse:
        """Read the head."""
        await super().start(connection)
        self.reason = None
        return self


class _Body(httpx.AsyncByteStream):
    """A response's body, as the network gives it. Unless it was read to its end, closing it closes the connection."""

    def __init__(self, stream: httpx.AsyncByteStream) -> None:
        self._stream = stream
        self._reads = cast(AsyncGenerator[bytes, None], aiter(stream))

    def __aiter__(self) -> "_Body":
        return self

    async def __anext__(self) -> bytes:
        try:
            return await anext(self._reads)
        except _RAISED as error:
            raise _httpx_error(error) from error

    async def aclose(self) -> None:
        """Give the connection back, or close it."""
        await self._reads.aclose()
        await self._stream.aclose()


def _httpx_error(error: Exception) -> httpx.TransportError:
    """Return httpx's error for one of aiohttp; its text holds no word from outside."""
    cause: BaseException = error
    if isinstance(error, httpx.HTTPError) and error.__cause__ is not None:
        cause = error.__cause__
    for error_class, httpx_class in _HTTPX_ERRORS:
        if isinstance(cause, error_class):
            return httpx_class(_error_text(cause))
    return httpx.NetworkError(_error_text(cause))


def _error_text(error: BaseException) -> str:
    """Return the message of OpenSSL, of the resolver or of the operating system, such as "Connection refused".

    Without one, return the name of the error's class in separate words, as OpenSSL's, because one long word would be
    redacted as a secret where the message is quoted."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, ssl.SSLError) and getattr(inner, "reason", None):
            return f"TLS: {inner.reason.replace('_', ' ').lower()}"
        if isinstance(inner, socket.gaierror) and inner.strerror:
            return inner.strerror
        inner = getattr(inner, "os_error", None) or inner.__cause__
    number = getattr(error, "errno", None) or 0
    if number > 0:
        return os.strerror(number)
    return " ".join(re.findall(r"[A-Z]+[a-z]*", type(error).__name__))


class NoCookies(httpx.Cookies):
    """A jar that takes no cookie and gives none; httpx's own would cost a tenth of a call's CPU."""

    def extract_cookies(self, response: httpx.Response) -> None:
        """Take nothing."""

    def set_cookie_header(self, request: httpx.Request) -> None:
        """Give nothing."""


class _Client(httpx.AsyncClient):
    """A client without cookies, whose responses are freed with their last use."""

    _none = NoCookies()

    async def send(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Send a request.

        httpx lets the response's stream refer to the response. Such a pair stays in memory until the garbage collector
        finds it, with the body of the request, and the collector of a busy process rarely looks (`gc_policy.py`). So
        the stream of the transport is put back.
        """
        response = await super().send(request, **options)
        response.stream = response.extensions.get(_STREAM, response.stream)
        return response

    @property
    def cookies(self) -> httpx.Cookies:
        """Return the empty jar."""
        return self._none

    @cookies.setter
    def cookies(self, cookies: object) -> None:
        raise AttributeError("this client keeps no cookies")
