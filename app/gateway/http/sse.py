"""Replies of runs: as server-sent events, or collected into one body.

A stream's first frame is sent at once, a keep-alive follows whenever nothing was sent for `GatewayContext.ping`
seconds, and each batch from the run's mailbox becomes one write. Once bytes are sent, an error is an `error` event and
no `[DONE]` follows. A client's disconnect is reported to its run at once; whether that ends the run is the run's own
policy. The request that began a run then waits for its end without sending: its admission permit is not free before.
"""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from app.engine.delivery.messages import AnswerPart, CallerMessage, FollowedRun, StepEvent, TurnEnd, without
from app.errors import BatonError, RunExpired
from app.gateway.http.admission import Begun, Permit
from app.gateway.http.connection import RequestLog, route_of
from app.gateway.http.context import GatewayContext

UNWATCHED = 0.1
"""Seconds that a collected reply waits before it watches its connection: most of the cheap runs have ended by then."""
LINGER = 5.0
"""Seconds for the last write to a client that reads slowly."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


async def collect(context: GatewayContext, begun: Begun, receive: Receive) -> TurnEnd:
    """Return the end of a turn that is not streamed; its permit is released.

    Raises the error that it ended with, or `RunExpired` if it has no end `GatewayContext.grace` after its time limit.
    """
    try:
        ended = await _end(context, begun, receive)
        begun.log.end(begun.driven, ended)
    finally:
        begun.permit.release()
    if ended.error is not None:
        raise ended.error
    return ended


async def _end(context: GatewayContext, begun: Begun, receive: Receive) -> TurnEnd:
    ended: TurnEnd | None = None
    driven, seconds = begun.driven, begun.seconds + context.grace
    try:
        ended = _end_in(await driven.line.take(UNWATCHED))
        if ended is None:
            watcher = _watch(context, driven, receive, begun.log)
            ended = await _watching(driven, watcher, lambda: _until_end(driven, seconds))
        return ended
    finally:
        if ended is None:
            context.runs.leave(driven)


async def _until_end(driven: FollowedRun, seconds: float) -> TurnEnd | None:
    try:
        async with asyncio.timeout(seconds):
            while True:
                if ended := _end_in(await driven.line.take(seconds)):
                    return ended
    except TimeoutError:
        return None


def _end_in(batch: Sequence[CallerMessage]) -> TurnEnd | None:
    if batch and isinstance(batch[-1], TurnEnd):
        return batch[-1]
    return None


async def _watching(
    driven: FollowedRun, watch: Coroutine[Any, Any, None], work: Callable[[], Awaitable[TurnEnd | None]]
) -> TurnEnd:
    """Do `work` and `watch` the connection; when the client disconnects, the mailbox gets an end before long."""
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch)
        try:
            ended = await work()
        finally:
            watcher.cancel()
    if ended is None:
        raise RunExpired(run=driven.run)
    return ended


async def _watch(context: GatewayContext, driven: FollowedRun, receive: Receive, log: RequestLog) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    log.is_disconnected = True
    context.runs.leave(driven)


class Frames(Protocol):
    """A wire format's events: bytes ready to be written."""

    ping: bytes
    """The keep-alive. Where it is a comment it does not end with a blank line: OpenAI's
    Python client takes each one for an event, of no data, once it has seen an `id:`."""

    def role(self) -> bytes:
        """Return the opening event."""
        ...

    def said(self, said: AnswerPart) -> bytes:
        """More of the answer."""
        ...

    def noted(self, noted: StepEvent) -> bytes:
        """Return an event of the run, for a caller that asked for them."""
        ...

    def ended(self, ended: TurnEnd) -> bytes:
        """Return all events that follow the answer."""
        ...

    def failed(self, error: BatonError, ended: TurnEnd) -> bytes:
        """Return the last event of a stream that failed after its first byte."""
        ...


class EventStream(Response):
    """A run as server-sent events."""

    media_type = "text/event-stream"

    def __init__(
        self, context: GatewayContext, driven: FollowedRun, frames: Frames, permit: Permit, seconds: float
    ) -> None:
        """`seconds` is the run's time limit. The stream owns `permit` and releases it when it is over."""
        self.status_code = 200
        self.background = None
        self.raw_headers = list(STREAM_HEADERS)
        self._context = context
        self._driven = driven
        self._wire = frames
        self._permit = permit
        self._seconds = seconds
        self._ended: TurnEnd | None = None
        self._complete = False
        self._log: RequestLog
        self._route = ""
        self._has_text = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream."""
        last = b""
        self._log, self._route = scope["baton.log"], route_of(scope)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, self._wire.role(), more=True)
            watch = _watch(self._context, self._driven, receive, self._log)
            await _watching(self._driven, watch, lambda: self._relay(send))
        except RunExpired as error:
            self._log.fail(error)
            last = self._wire.failed(error, without(self._driven.state, error))
        finally:
            if self._ended is None:
                self._context.runs.leave(self._driven)
            self._permit.release()
        if not self._complete:
            with suppress(TimeoutError):  # a client that does not read holds nothing but its own connection
                async with asyncio.timeout(LINGER):
                    await _write(send, last, more=False)

    async def _relay(self, send: Send) -> TurnEnd | None:
        try:
            async with asyncio.timeout(self._seconds + self._context.grace):
                while self._ended is None:
                    batch = await self._driven.line.take(self._context.ping)
                    frames = self._frames(batch) if batch else self._wire.ping
                    await _write(send, frames, more=self._ended is None)
            self._complete = True
        except TimeoutError:
            return None
        return self._ended

    def _frames(self, batch: Sequence[CallerMessage]) -> bytes:
        wire = self._wire
        frames: list[bytes] = []
        for message in batch:
            if isinstance(message, AnswerPart):
                self._note_first_text()
                frames.append(wire.said(message))
            elif isinstance(message, StepEvent):
                frames.append(wire.noted(message))
            else:
                self._ended = message
                self._log.end(self._driven, message)
                self._permit.release()  # before the caller can know that there is room for another request
                frames.append(self._last(message))
        return b"".join(frames)

    def _note_first_text(self) -> None:
        if not self._has_text:
            self._has_text = True
            seconds = self._context.tick() - self._log.began
            self._context.telemetry.observe("baton_stream_first_text_seconds", seconds, self._route)

    def _last(self, ended: TurnEnd) -> bytes:
        if ended.error is None:
            return self._wire.ended(ended)
        return self._wire.failed(ended.error, ended)


async def _write(send: Send, frames: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": frames, "more_body": more})
