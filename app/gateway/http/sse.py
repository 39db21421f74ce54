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

from app.engine.delivery.messages import AnswerPart, CallerMessage, FollowedRun, StepEvent, TurnEnd, end_with_error
from app.errors import BatonError, RunExpired
from app.gateway.http.connection import route_of
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import OpenTurn

UNWATCHED_SECONDS = 0.1
"""How long a collected reply waits before it watches its connection: most of the cheap runs have ended by then."""
LAST_WRITE_SECONDS = 5.0
"""Time for the last write to a client that reads slowly."""
STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache, no-transform"),
    (b"x-accel-buffering", b"no"),
]


async def collect(context: GatewayContext, turn: OpenTurn, receive: Receive) -> TurnEnd:
    """Return the end of a turn that is not streamed; its permit is released.

    Raises the error that it ended with, or `RunExpired` if it has no end `GatewayContext.grace` after its time limit.
    """
    try:
        end = await _end(context, turn, receive)
        turn.log.end(turn.run, end)
    finally:
        turn.permit.release()
    if end.error is not None:
        raise end.error
    return end


async def _end(context: GatewayContext, turn: OpenTurn, receive: Receive) -> TurnEnd:
    end: TurnEnd | None = None
    run, seconds = turn.run, turn.seconds + context.grace
    try:
        end = _end_in(await run.mailbox.take(UNWATCHED_SECONDS))
        if end is None:
            watcher = _watch(context, turn, receive)
            end = await _watching(run, watcher, lambda: _until_end(run, seconds))
        return end
    finally:
        if end is None:
            context.runs.leave(run)


async def _until_end(run: FollowedRun, seconds: float) -> TurnEnd | None:
    try:
        async with asyncio.timeout(seconds):
            while True:
                end = _end_in(await run.mailbox.take(seconds))
                if end is not None:
                    return end
    except TimeoutError:
        return None


def _end_in(batch: Sequence[CallerMessage]) -> TurnEnd | None:
    if batch and isinstance(batch[-1], TurnEnd):
        return batch[-1]
    return None


async def _watching(
    run: FollowedRun, watch: Coroutine[Any, Any, None], work: Callable[[], Awaitable[TurnEnd | None]]
) -> TurnEnd:
    """Do `work` and `watch` the connection; when the client disconnects, the mailbox gets an end before long."""
    async with asyncio.TaskGroup() as group:
        watcher = group.create_task(watch)
        try:
            end = await work()
        finally:
            watcher.cancel()
    if end is None:
        raise RunExpired(run=run.run)
    return end


async def _watch(context: GatewayContext, turn: OpenTurn, receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
    turn.log.is_disconnected = True
    context.runs.leave(turn.run)


class Frames(Protocol):
    """A wire format's events: bytes ready to be written."""

    ping: bytes
    """The keep-alive. Where it is a comment it does not end with a blank line: OpenAI's Python client takes each one
    for an event without data, once it has seen an `id:`."""

    def opening(self) -> bytes:
        """Return the opening event."""
        ...

    def answer_part(self, part: AnswerPart) -> bytes:
        """Return more of the answer."""
        ...

    def step_event(self, event: StepEvent) -> bytes:
        """Return an event of the run, for a caller that asked for them."""
        ...

    def closing(self, end: TurnEnd) -> bytes:
        """Return all events that follow the answer."""
        ...

    def failure(self, error: BatonError, end: TurnEnd) -> bytes:
        """Return the last event of a stream that failed after its first byte."""
        ...


class EventStream(Response):
    """A run as server-sent events."""

    media_type = "text/event-stream"

    def __init__(self, context: GatewayContext, turn: OpenTurn, frames: Frames) -> None:
        """The stream owns the turn's permit, and releases it when it is over."""
        self.status_code = 200
        self.background = None
        self.raw_headers = list(STREAM_HEADERS)
        self._context = context
        self._turn = turn
        self._wire = frames
        self._turn_end: TurnEnd | None = None
        self._is_complete = False
        self._route = ""
        self._has_text = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream."""
        last = b""
        turn, self._route = self._turn, route_of(scope)
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            await _write(send, self._wire.opening(), more=True)
            watch = _watch(self._context, turn, receive)
            await _watching(turn.run, watch, lambda: self._relay(send))
        except RunExpired as error:
            turn.log.fail(error)
            last = self._wire.failure(error, end_with_error(turn.run.state, error))
        finally:
            if self._turn_end is None:
                self._context.runs.leave(turn.run)
            turn.permit.release()
        if not self._is_complete:
            with suppress(TimeoutError):  # a client that does not read holds nothing but its own connection
                async with asyncio.timeout(LAST_WRITE_SECONDS):
                    await _write(send, last, more=False)

    async def _relay(self, send: Send) -> TurnEnd | None:
        try:
            async with asyncio.timeout(self._turn.seconds + self._context.grace):
                while self._turn_end is None:
                    batch = await self._turn.run.mailbox.take(self._context.ping)
                    frames = self._frames(batch) if batch else self._wire.ping
                    await _write(send, frames, more=self._turn_end is None)
            self._is_complete = True
        except TimeoutError:
            return None
        return self._turn_end

    def _frames(self, batch: Sequence[CallerMessage]) -> bytes:
        wire = self._wire
        frames: list[bytes] = []
        for message in batch:
            if isinstance(message, AnswerPart):
                self._note_first_text()
                frames.append(wire.answer_part(message))
            elif isinstance(message, StepEvent):
                frames.append(wire.step_event(message))
            else:
                self._turn_end = message
                self._turn.log.end(self._turn.run, message)
                self._turn.permit.release()  # before the caller can know that there is room for another request
                frames.append(self._last(message))
        return b"".join(frames)

    def _note_first_text(self) -> None:
        if not self._has_text:
            self._has_text = True
            seconds = self._context.tick() - self._turn.log.began
            self._context.telemetry.observe("baton_stream_first_text_seconds", seconds, self._route)

    def _last(self, end: TurnEnd) -> bytes:
        if end.error is None:
            return self._wire.closing(end)
        return self._wire.failure(end.error, end)


async def _write(send: Send, frames: bytes, *, more: bool) -> None:
    await send({"type": "http.response.body", "body": frames, "more_body": more})
