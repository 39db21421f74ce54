"""Event streams that follow runs for as long as their caller wishes: how many may be open, and when they end.

A stream ends when its source does, after the seconds that were asked for, when the client disconnects, when the process
is told to stop, and within `GatewayContext.key_ttl` of the moment at which its key may not read any more.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.errors import Overloaded, OverQuota
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext

MOST: Final = 1_000
"""Streams of one process at a time."""
MOST_OF_KEY: Final = 200
"""Streams of one key at a time in one process."""
RETRY_SECONDS: Final = 5.0
AWAY_SECONDS: Final = 1.0
"""How long a stream pauses after a reading that failed, because the database is away."""
SCOPE: Final = "runs:read"
"""The scope that a stream needs as long as it is open."""
HEADERS: Final = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-store"),
    (b"x-accel-buffering", b"no"),
)


class OpenStreams:
    """The streams of this process that are open, counted by key."""

    def __init__(self, context: GatewayContext, keys: Keys) -> None:
        self.context = context
        self.keys = keys
        self._open: Counter[str] = Counter()

    def begin(self, request: Request, caller: Caller, frames: AsyncGenerator[bytes], seconds: float | None) -> Response:
        """Return the reply that writes these frames for at most so many `seconds`; None: without an end of its own.

        Raises `Overloaded` if the process has too many streams, `OverQuota` if the key has."""
        if request.method == "HEAD":  # which would wait for a stream's end, and for no body
            return Response(media_type=OpenStream.media_type)
        if self._open.total() >= MOST:
            message = f"This process has {MOST:,} open streams already. Connect again later."
            raise Overloaded(message, retry_after=RETRY_SECONDS)
        key = caller.key.id
        if self._open[key] >= MOST_OF_KEY:
            message = f"This key has {MOST_OF_KEY} open streams already. Close one, then connect again."
            raise OverQuota(message, limit="concurrency", retry_after=RETRY_SECONDS)
        self._open[key] += 1
        return OpenStream(self, request, key, frames, seconds)

    def end(self, key: str) -> None:
        """Forget a stream of a key."""
        self._open[key] -= 1
        if not self._open[key]:
            del self._open[key]


class OpenStream(Response):
    """The reply of one stream."""

    media_type = "text/event-stream"

    def __init__(
        self, streams: OpenStreams, request: Request, key: str, frames: AsyncGenerator[bytes], seconds: float | None
    ) -> None:
        self.status_code = 200
        self.background = None
        self.raw_headers = list(HEADERS)
        self._streams = streams
        self._request = request
        self._key = key
        self._frames = frames
        self._seconds = seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream until it ends."""
        try:
            await self._run(receive, send)
        finally:
            self._streams.end(self._key)

    async def _run(self, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._frames) as frames:
            await self._write_one(frames, send)  # also where the time that was asked for is none
            async with asyncio.TaskGroup() as group:
                disconnect = group.create_task(_wait_for_disconnect(receive))
                tasks = (
                    disconnect,
                    group.create_task(self._write(frames, send)),
                    group.create_task(self._streams.context.stop_requested.wait()),
                    group.create_task(self._streams.keys.wait_until_refused(self._request, SCOPE)),
                )
                await asyncio.wait(tasks, timeout=self._seconds, return_when=asyncio.FIRST_COMPLETED)
                for task in tasks:
                    task.cancel()
        if disconnect.cancelled():
            await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _write(self, frames: AsyncGenerator[bytes], send: Send) -> None:
        while await self._write_one(frames, send):
            pass

    async def _write_one(self, frames: AsyncGenerator[bytes], send: Send) -> bool:
        """Write the next frame; False if there is none."""
        frame = await anext(frames, None)
        if frame:
            await send({"type": "http.response.body", "body": frame, "more_body": True})
        return frame is not None


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
