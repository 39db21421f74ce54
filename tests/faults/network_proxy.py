"""A TCP proxy between Baton and one of its servers, which can be made slow, silent, broken or absent.

A `NetworkProxy` listens on a loopback port of its own and forwards to another one, in a thread with an event loop of
its own, so that a test may block. Its port stays reserved while it refuses, so that nobody else gets it meanwhile.
"""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from msgspec import Struct
from sqlalchemy.engine import make_url

PIECE = 1 << 16


class Pass(Struct, frozen=True):
    """Forward everything at once."""


class Slow(Struct, frozen=True):
    """At most so many bytes per second in each direction of each connection."""

    rate: float


class Delay(Struct, frozen=True):
    """Every piece arrives so many seconds later."""

    seconds: float


class Hole(Struct, frozen=True):
    """Take everything and deliver nothing; what was taken arrives if the line passes again."""


class Refuse(Struct, frozen=True):
    """Break what is connected, and refuse every new connection."""


class Cut(Struct, frozen=True):
    """Reset a connection once it has carried so many bytes of answers, in the middle of whatever they are."""

    after: int


Mode = Pass | Slow | Delay | Hole | Refuse | Cut


@dataclass(slots=True, eq=False)
class NetworkProxy:
    """A proxy made by `run_proxy`. Its methods may be called from any thread and return when the change is in force."""

    target: int
    _loop: asyncio.AbstractEventLoop
    port: int = 0
    carried: int = 0
    """Bytes of answers, over all connections."""
    cuts: int = 0
    _mode: Mode = field(default_factory=Pass)
    _holder: socket.socket | None = None
    _listener: asyncio.Server | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _ends: set[asyncio.StreamWriter] = field(default_factory=set)
    _carriers: set[asyncio.Task[None]] = field(default_factory=set)

    def set(self, mode: Mode) -> None:
        """From now on, for what is connected and for what will be."""
        self._call(self._set(mode))

    def reset(self) -> None:
        """RST whatever is connected now."""
        self._call(self._reset())

    def aim(self, target: int) -> None:
        """Lead elsewhere, as after a failover: what is connected breaks, what connects anew gets there."""
        self.target = target
        self.reset()

    def url(self, url: str) -> str:
        """Return the server's URL with this line's port in it."""
        return make_url(url).set(host="127.0.0.1", port=self.port).render_as_string(hide_password=False)

    @contextmanager
    def in_mode(self, mode: Mode) -> Iterator[None]:
        """Set that mode within the block."""
        self.set(mode)
        try:
            yield
        finally:
            self.set(Pass())

    def _call(self, work: Any) -> None:
        asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    async def open(self) -> None:
        """Take a port and listen on it. A second, silent socket on it keeps it ours while nobody listens."""
        self._holder = _bind(0)
        self.port = self._holder.getsockname()[1]
        await self._listen()

    async def close(self) -> None:
        """Break everything."""
        await self._set(Refuse())
        for carrier in self._carriers:
            carrier.cancel()
        await asyncio.gather(*self._carriers, return_exceptions=True)
        if self._holder is not None:
            self._holder.close()

    async def _set(self, mode: Mode) -> None:
        self._mode = mode
        self._changed.set()
        self._changed = asyncio.Event()
        if isinstance(mode, Refuse):
            if self._listener is not None:
                self._listener.close()
                self._listener = None
            await self._reset()
        elif self._listener is None:
            await self._listen()

    async def _listen(self) -> None:
        listener = _bind(self.port)
        self._listener = await asyncio.start_server(self._connect, sock=listener, backlog=512)

    async def _reset(self) -> None:
        for end in list(self._ends):
            _break(end)

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        carrier = asyncio.current_task()
        assert carrier is not None
        self._carriers.add(carrier)
        try:
            there, onward = await asyncio.open_connection("127.0.0.1", self.target)
        except (OSError, asyncio.CancelledError):  # nobody is there, or the line closes
            _break(writer)
            return
        finally:
            self._carriers.discard(carrier)
        pair = (writer, onward)
        if isinstance(self._mode, Refuse):  # since it was accepted
            for end in pair:
                _break(end)
            return
        self._carriers.add(carrier)
        self._ends.update(pair)
        try:
            await asyncio.gather(self._carry(reader, onward, None), self._carry(there, writer, pair))
        except asyncio.CancelledError:
            return  # the line closes
        finally:
            self._carriers.discard(carrier)
            self._ends.difference_update(pair)
            for end in pair:
                end.close()

    async def _carry(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, answers: tuple[asyncio.StreamWriter, ...] | None
    ) -> None:
        """One direction of a connection; `answers` has both ends if it is the one from the server."""
        carried = 0
        with suppress(OSError):
            while data := await source.read(PIECE):
                left = memoryview(data)
                while left:
                    sent_size = await self._allow(left, carried if answers else 0)
                    carried += sent_size
                    self.carried += sent_size if answers else 0
                    sink.write(bytes(left[:sent_size]))
                    await sink.drain()
                    left = left[sent_size:]
                    if answers and isinstance(self._mode, Cut) and carried >= self._mode.after:
                        return self._cut(answers)
            await self._gate()
        with suppress(OSError, RuntimeError):
            sink.write_eof()

    def _cut(self, ends: tuple[asyncio.StreamWriter, ...]) -> None:
        self.cuts += 1
        for end in ends:
            _break(end)

    async def _allow(self, data: memoryview, carried: int) -> int:
        """Wait as long as the mode wants; how many of these bytes may go then."""
        await self._gate()
        mode = self._mode
        if isinstance(mode, Slow):
            size = min(len(data), max(1, int(mode.rate / 10)))
            await self._pause(size / mode.rate)
            return size
        if isinstance(mode, Delay):
            await self._pause(mode.seconds)
        if isinstance(mode, Cut):
            return max(1, min(len(data), mode.after - carried))
        return len(data)

    async def _gate(self) -> None:
        while isinstance(self._mode, Hole):
            await self._changed.wait()

    async def _pause(self, seconds: float) -> None:
        """Wait, unless the mode changes meanwhile."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._changed.wait()


def _bind(port: int) -> socket.socket:
    new_socket = socket.socket()
    new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    new_socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    new_socket.bind(("127.0.0.1", port))
    return new_socket


def _break(end: asyncio.StreamWriter) -> None:
    """RST instead of a polite end."""
    peer = end.get_extra_info("socket")
    if peer is not None:
        with suppress(OSError):
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.transport.abort()


@contextmanager
def run_proxy(target: int) -> Iterator[NetworkProxy]:
    """Proxy a port for the length of the block."""
    with running_loop("network proxy") as loop:
        new_proxy = NetworkProxy(target, loop)
        new_proxy._call(new_proxy.open())
        try:
            yield new_proxy
        finally:
            new_proxy._call(new_proxy.close())


@contextmanager
def running_loop(name: str) -> Iterator[asyncio.AbstractEventLoop]:
    """An event loop in a thread of that name; in the end what still runs there is cancelled, and the loop is closed."""
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = Future()

    async def stay() -> None:
        over = asyncio.Event()
        started.set_result((asyncio.get_running_loop(), over))
        await over.wait()

    thread = threading.Thread(target=lambda: asyncio.run(stay()), name=name, daemon=True)
    thread.start()
    loop, over = started.result(10)
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
