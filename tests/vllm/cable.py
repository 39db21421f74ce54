"""The line to a server, which can be cut: a forwarder on loopback that breaks off in the middle of an answer."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field


@dataclass(slots=True)
class Cable:
    """Forwards every connection to `port`. After `cut_after` bytes of answers it resets the connection."""

    port: int
    cut_after: int | None = None
    carried: int = 0
    _server: asyncio.Server | None = None
    _ends: set[asyncio.StreamWriter] = field(default_factory=set)

    @property
    def base_url(self) -> str:
        """Return the base URL for a client."""
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}/v1"

    async def plug(self) -> None:
        """Listen."""
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)

    async def pull(self) -> None:
        """From now on nobody is there."""
        if self._server is not None and self._server.is_serving():
            self._server.close()
        self._cut()
        await asyncio.sleep(0)

    def _cut(self) -> None:
        for end in self._ends:
            end.transport.abort()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            there, onward = await asyncio.open_connection("127.0.0.1", self.port)
            self._ends |= {writer, onward}
            await asyncio.gather(self._carry(reader, onward, answers=False), self._carry(there, writer, answers=True))
        for end in (writer, onward):
            self._ends.discard(end)
            end.close()

    async def _carry(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, *, answers: bool) -> None:
        with suppress(OSError):
            while data := await source.read(256):
                sink.write(data)
                await sink.drain()
                self.carried += len(data) if answers else 0
                if self.cut_after is not None and self.carried >= self.cut_after:
                    self._cut()
        with suppress(OSError):
            sink.close()


@asynccontextmanager
async def cable(port: int) -> AsyncIterator[Cable]:
    """A cable to that port for the length of the block."""
    new_cable = Cable(port)
    await new_cable.plug()
    try:
        yield new_cable
    finally:
        await new_cable.pull()
