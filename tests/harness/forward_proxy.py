"""A forward proxy on loopback: tunnels for https, forwarded requests for http. It records what it was asked for."""

import asyncio
import base64
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

CONNECT_SECONDS = 5.0


class ForwardProxy:
    """`async with ForwardProxy() as proxy:` listens at `proxy.url`; with `credentials` (`user:password`) it demands
    them."""

    def __init__(self, credentials: str | None = None) -> None:
        self._expected = None if credentials is None else "Basic " + base64.b64encode(credentials.encode()).decode()
        self.requests: list[str] = []
        """The method and the target of each request, such as `CONNECT example.com:443`."""
        self.seen = b""
        """All bytes that came from clients."""
        self.refused = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._answer(reader, writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        self.seen += head
        first, *lines = head.decode().split("\r\n")
        method, target, version = first.split(" ")
        headers = {}
        for line in lines:
            name, _, value = line.partition(":")
            headers[name.lower()] = value.strip()
        self.requests.append(f"{method} {target}")
        if self._expected is not None and headers.get("proxy-authorization") != self._expected:
            self.refused += 1
            writer.write(b"HTTP/1.1 407 Proxy Authentication Required\r\nContent-Length: 0\r\n\r\n")
            await writer.drain()
            return
        place = urlsplit(f"//{target}" if method == "CONNECT" else target)
        async with asyncio.timeout(CONNECT_SECONDS):
            upstream_reader, upstream_writer = await asyncio.open_connection(place.hostname, place.port or 80)
        try:
            if method == "CONNECT":
                writer.write(b"HTTP/1.1 200 Connection established\r\n\r\n")
            else:
                upstream_writer.write(f"{method} {place.path} {version}\r\n".encode() + head.partition(b"\r\n")[2])
            async with asyncio.TaskGroup() as group:
                group.create_task(self._copy(reader, upstream_writer, record=True))
                group.create_task(self._copy(upstream_reader, writer, record=False))
        finally:
            upstream_writer.close()

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, record: bool) -> None:
        """Copy until one side closes; then close the other, so that the opposite direction ends, too."""
        try:
            while read := await reader.read(1 << 16):
                if record:
                    self.seen += read
                writer.write(read)
                await writer.drain()
        except OSError:
            pass
        finally:
            writer.close()
